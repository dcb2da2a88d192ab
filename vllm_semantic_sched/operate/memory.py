"""Memory that a process can still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process and its children can still take: of the machine, and of their
    control group (a container)."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used, stat = (
            (group / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
    except OSError:
        return available
    if limit.strip() == "max":
        return available
    # The kernel drops cached files before it refuses memory.
    cached = int(dict(line.split() for line in stat.splitlines())["inactive_file"])
    return min(available, int(limit) - int(used) + cached)
