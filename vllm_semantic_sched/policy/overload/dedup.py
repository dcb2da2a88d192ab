"""Deduplication: only the newest of the requests with one key waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.policy.config.overload import Dedup
from vllm_semantic_sched.policy.facts.job import Job

_LONGEST_KEY = 128  # characters

DEDUP_FIELD = "dedup_key"
"""Key in a request's `vllm_xargs`."""

_Key = tuple[str, str]  # tenant, key


class BadKey(ValueError):
    """The key is unusable; the request is served without it."""


@dataclass(slots=True)
class _Newest:
    origin: str
    jobs: dict[Job, None]


class DedupIndex:
    """The newest request of each key, among the requests that have not ended.

    A client's request with several prompts or answers becomes several requests here. They have the
    same origin and do not supersede each other.
    """

    def __init__(self) -> None:
        self._newest: dict[_Key, _Newest] = {}
        self._keys: dict[Job, _Key] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def older(self, job: Job, key: str, origin: str, rules: Dedup) -> list[Job]:
        """Requests that `job` supersedes. Changes nothing."""
        newest = self._newest.get((job.tenant, key))
        if newest is None or newest.origin == origin:
            return []
        return [other for other in newest.jobs if other.started is None or rules.running == "end"]

    def add(self, job: Job, key: str, origin: str) -> None:
        """Make `job` the newest with this key."""
        full = (job.tenant, key)
        newest = self._newest.get(full)
        if newest is None or newest.origin != origin:
            newest = self._newest[full] = _Newest(origin, {})
        newest.jobs[job] = None
        self._keys[job] = full

    def discard(self, job: Job) -> None:
        """Remove an ended job."""
        key = self._keys.pop(job, None)
        newest = None if key is None else self._newest.get(key)
        if key is not None and newest is not None and job in newest.jobs:
            del newest.jobs[job]
            if not newest.jobs:
                del self._newest[key]


def read_key(extra_args: Any, rules: Dedup) -> str | None:
    """The key in a request's `vllm_xargs`; None without a key or with deduplication off. BadKey if
    it is not a string, empty or too long."""
    if not rules.enabled or not isinstance(extra_args, dict):
        return None
    if (key := extra_args.get(DEDUP_FIELD)) is None:
        return None
    if not isinstance(key, str):
        raise BadKey(f"{DEDUP_FIELD} must be a string, got {type(key).__name__}")
    if not 0 < len(key) <= _LONGEST_KEY:
        raise BadKey(f"{DEDUP_FIELD} has {len(key)} characters; valid: 1 to {_LONGEST_KEY}")
    return key
