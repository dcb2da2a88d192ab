"""Requests that wait for a first seat: their places in the queue, age and timeouts."""

from collections.abc import Iterator
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.capacity import Allocations
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job


class Entry(NamedTuple):
    """The values with which a request was counted; `since` is its time of arrival."""

    level: int
    tokens: float
    tenant: str
    since: float


class QueueAccount:
    """Requests that have not had a seat yet, so without preempted ones; their number and tokens are
    in `allocations`. Operations are O(levels) or O(log n)."""

    def __init__(self, allocations: Allocations) -> None:
        self._holdings = allocations
        self._jobs: list[dict[Job, None]] = [{} for _ in allocations.levels]  # oldest first
        self.entries: dict[Job, Entry] = {}
        self._deadlines: AddressableHeap[Job] = AddressableHeap()

    def enter(self, job: Job, entry: Entry, timeout: float | None) -> None:
        """Add a request, as the newest of its level."""
        self.entries[job] = entry
        self._jobs[entry.level][job] = None
        self._add(entry, 1, entry.tokens)
        if timeout is not None:
            self._deadlines.push(job, entry.since + timeout)

    def leave(self, job: Job) -> Entry | None:
        """Remove a request and return its entry; None if it was not counted."""
        entry = self.entries.pop(job, None)
        if entry is None:
            return None
        del self._jobs[entry.level][job]
        self._add(entry, -1, -entry.tokens)
        self._holdings.forget(entry.tenant)
        self._deadlines.discard(job)
        return entry

    def timed_out(self, now: float) -> Iterator[Job]:
        """Requests past their timeout; the caller removes each before taking the next."""
        while (job := self._deadlines.peek()) is not None and self._deadlines.key(job) <= now:
            yield job
            self._deadlines.discard(job)

    def oldest(self, level: int) -> Job | None:
        """The oldest request of a level."""
        return next(iter(self._jobs[level]), None)

    def least_important(self, above: int) -> Job | None:
        """The newest of the least urgent requests below level `above`; None without one."""
        jobs = next(filter(None, reversed(self._jobs[above + 1 :])), None)
        return next(reversed(jobs)) if jobs else None

    def _add(self, entry: Entry, requests: int, tokens: float) -> None:
        allocations = self._holdings
        for held in (
            allocations.all,
            allocations.levels[entry.level],
            allocations.tenants[entry.tenant],
        ):
            held.queue(requests, tokens)
