"""Notices that a policy file has changed."""

from __future__ import annotations

from pathlib import Path

from vllm_semantic_sched.policy.facts.files import resolve_config


class PolicyFile:
    """A policy file, by name or path, that somebody looks at again and again.

    Raises:
        PolicyError: at construction, if there is none.
    """

    def __init__(self, name_or_path: str | Path) -> None:
        self.path = resolve_config(name_or_path, "policy")
        self._seen: tuple[int, ...] | None = None
        self._adopted: tuple[int, ...] | None = None

    def has_changed(self) -> bool:
        """Whether the file is another one than when this last returned True, and the same as at the
        last call, so that nobody reads it while it is being written.

        A link that leads to another file counts, as in a Kubernetes ConfigMap; a file that is gone
        does not. True at the second call too: a server reads its policy long before it is up.
        """
        now = _signature(self.path)
        changed = now is not None and now == self._seen and now != self._adopted
        self._seen = now
        if changed:
            self._adopted = now
        return changed


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
