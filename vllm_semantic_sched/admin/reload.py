"""`semsched policy reload`: make a running server read its policy file again."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from vllm_semantic_sched.admin.client import AdminClient, AdminError, add_server_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_server_arguments(parser, required=False)
    parser.add_argument(
        "--pid",
        type=int,
        help="instead of --server: the server's process, or an engine's; its engines get SIGHUP "
        "and say in the log what came of it",
    )


def run(args: argparse.Namespace) -> int:
    """Reload and say what happened; 1 if the old policy stays in force."""
    if (args.server is None) == (args.pid is None):
        print("give either --server or --pid", file=sys.stderr)
        return 2
    try:
        if args.pid is not None:
            return _signal(args.pid)
        engines = AdminClient(args.server, args.api_key).post("/policy/reload")["engines"]
    except AdminError as error:
        print(f"not reloaded, the old policy stays in force:\n{error}", file=sys.stderr)
        return 1
    for number, report in enumerate(engines):
        changed = f"; changed: {', '.join(report['changed'])}" if report.get("changed") else ""
        print(
            f"engine {number}: {report['result']}, version {report['version']} "
            f"({report['fingerprint']}){changed}"
        )
    return 0


def _signal(pid: int) -> int:
    family = [pid, *_descendants(pid)]
    engines = [process for process in family if _is_engine(process)]
    if not engines:
        raise AdminError(f"process {pid} is no vLLM server and no engine of one")
    deaf = [process for process in engines if not _catches_hangup(process)]
    if deaf:
        raise AdminError(
            f"SIGHUP would end engine process {deaf[0]}: it was started from a terminal, or runs "
            "another scheduler. Use --server, or start the server with nohup or as a service."
        )
    for process in engines:
        os.kill(process, signal.SIGHUP)
        print(
            f"engine process {process} reads its policy again; its log and "
            "semsched:policy_reloads_total tell the result"
        )
    return 0


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    try:
        lists = [(task / "children").read_text() for task in tasks.iterdir()]
    except OSError:
        return []
    return [int(child) for text in lists for child in text.split()]


def _is_engine(pid: int) -> bool:
    try:
        return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _catches_hangup(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1)
