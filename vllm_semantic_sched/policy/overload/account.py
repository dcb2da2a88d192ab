"""Requests that wait for a first seat: their places in the queue, age and timeouts."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.capacity import Allocations
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job


class Entry(NamedTuple):
    """The values with which a request was counted; `since` is its time of arrival, `start_by` the
    latest time to start it for its deadline, inf without one."""

    level: int
    tokens: float
    tenant: str
    since: float
    start_by: float = math.inf


class QueueAccount:
    """Requests that have not had a seat yet, so without preempted ones; their number and tokens are
    in `allocations`. Operations are O(levels) or O(log n)."""

    def __init__(self, allocations: Allocations) -> None:
        self._allocations = allocations
        # By level, oldest first.
        self.entries: list[dict[Job, Entry]] = [{} for _ in allocations.levels]
        self._deadlines: AddressableHeap[Job] = AddressableHeap()

    def enter(self, job: Job, entry: Entry, timeout: float | None) -> None:
        """Add a request, as the newest of its level."""
        self.entries[entry.level][job] = entry
        self._add(entry, 1, entry.tokens)
        if timeout is not None:
            self._deadlines.push(job, entry.since + timeout)

    def leave(self, job: Job) -> Entry | None:
        """Remove a request and return its entry; None if it was not counted."""
        for entries in self.entries:
            entry = entries.pop(job, None)
            if entry is not None:
                self._add(entry, -1, -entry.tokens)
                self._allocations.forget(entry.tenant)
                self._deadlines.discard(job)
                return entry
        return None

    def timed_out(self, now: float) -> Iterator[Job]:
        """Requests past their timeout; the caller removes each before taking the next."""
        while (job := self._deadlines.peek()) is not None and self._deadlines.key(job) <= now:
            yield job
            self._deadlines.discard(job)

    def oldest(self, level: int) -> Job | None:
        """The oldest request of a level."""
        return next(iter(self.entries[level]), None)

    def least_important(self, above: int) -> Job | None:
        """The newest of the least urgent requests below level `above`; None without one."""
        jobs = next(filter(None, reversed(self.entries[above + 1 :])), None)
        return next(reversed(jobs)) if jobs else None

    def _add(self, entry: Entry, requests: int, tokens: float) -> None:
        allocations = self._allocations
        allocations.all.queued += requests
        allocations.tenants[entry.tenant].queued += requests
        level = allocations.levels[entry.level]
        level.queued += requests
        # Without requests, clear rounding errors.
        level.queued_tokens = level.queued_tokens + tokens if level.queued else 0.0
