"""Deduplication: only the newest of the requests with one key waits."""

from typing import Any

from vllm_semantic_sched.policy.config.overload import Dedup
from vllm_semantic_sched.policy.facts.job import Job

_LONGEST_KEY = 128  # characters
DEDUP_FIELD = "dedup_key"  # in a request's `vllm_xargs`

_Key = tuple[str, str]  # tenant, key


class BadKey(ValueError):
    """The key is unusable; the request is served without it."""


class DedupIndex:
    """The newest request of each key that has not ended. A client's request with several prompts or
    answers becomes several here, of the same origin, which do not supersede each other."""

    def __init__(self) -> None:
        self._newest: dict[_Key, tuple[str, dict[Job, None]]] = {}  # origin, jobs
        self.keys: dict[Job, _Key] = {}  # of the requests that have one

    def __len__(self) -> int:
        return len(self._newest)

    def older(self, job: Job, key: str, origin: str, dedup: Dedup) -> list[Job]:
        """Requests that `job` supersedes. Changes nothing."""
        newest, jobs = self._newest.get((job.tenant, key), (origin, {}))
        if newest == origin:
            return []
        return [other for other in jobs if other.started is None or dedup == "running"]

    def add(self, job: Job, key: str, origin: str) -> None:
        """Make `job` the newest with this key."""
        full = self.keys[job] = (job.tenant, key)
        if full not in self._newest or self._newest[full][0] != origin:
            self._newest[full] = (origin, {})
        self._newest[full][1][job] = None

    def discard(self, job: Job) -> None:
        """Remove an ended job that has a key."""
        key = self.keys.pop(job)
        _, jobs = self._newest.get(key, ("", {}))
        jobs.pop(job, None)
        if not jobs:
            self._newest.pop(key, None)


def read_key(extra_args: Any) -> str | None:
    """The key in a request's `vllm_xargs`; None without one. BadKey if it is not a string, empty or
    too long."""
    if not isinstance(extra_args, dict):
        return None
    if (key := extra_args.get(DEDUP_FIELD)) is None:
        return None
    if not isinstance(key, str):
        raise BadKey(f"{DEDUP_FIELD} must be a string, got {type(key).__name__}")
    if not 0 < len(key) <= _LONGEST_KEY:
        raise BadKey(f"{DEDUP_FIELD} has {len(key)} characters; valid: 1 to {_LONGEST_KEY}")
    return key
