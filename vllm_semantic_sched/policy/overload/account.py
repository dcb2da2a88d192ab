"""Requests that wait for a first seat, by level and tenant: number, tokens, age."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job


@dataclass(slots=True)
class Amount:
    """Number of requests, and their prompt and predicted output tokens."""

    requests: int = 0
    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        self.requests += 1
        self.tokens += tokens

    def subtract(self, tokens: float) -> None:
        self.requests -= 1
        self.tokens = self.tokens - tokens if self.requests else 0.0  # clears rounding errors


class Entry(NamedTuple):
    """The values with which a request was counted; `since` is its time of arrival."""

    level: int
    tokens: float
    tenant: str
    since: float


class QueueAccount:
    """Requests that have not had a seat yet, so without preempted ones: their number and tokens in
    all, by level and by tenant. Operations are O(levels) or O(log n)."""

    def __init__(self, levels: int) -> None:
        self.all = Amount()
        self._levels = [Amount() for _ in range(levels)]
        self._jobs: list[dict[Job, None]] = [{} for _ in range(levels)]  # oldest first
        self._tenants: defaultdict[str, Amount] = defaultdict(Amount)
        self._entries: dict[Job, Entry] = {}
        self._deadlines: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: object) -> bool:
        return job in self._entries

    def level(self, level: int) -> Amount:
        return self._levels[level]

    def tenant(self, tenant: str) -> Amount:
        return self._tenants.get(tenant) or Amount()

    def tokens_up_to(self, level: int) -> float:
        """Waiting tokens of requests at least as urgent as a level."""
        return sum(each.tokens for each in self._levels[: level + 1])

    def enter(self, job: Job, entry: Entry, timeout: float | None) -> None:
        """Add a request, as the newest of its level."""
        self._entries[job] = entry
        level, tokens, tenant, _ = entry
        self._jobs[level][job] = None
        for amount in (self.all, self._levels[level], self._tenants[tenant]):
            amount.add(tokens)
        if timeout is not None:
            self._deadlines.push(job, entry.since + timeout)

    def leave(self, job: Job) -> Entry | None:
        """Remove a request and return its entry; None if it was not counted."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return None
        level, tokens, tenant, _ = entry
        del self._jobs[level][job]
        for amount in (self.all, self._levels[level], self._tenants[tenant]):
            amount.subtract(tokens)
        if not self._tenants[tenant].requests:
            del self._tenants[tenant]
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
