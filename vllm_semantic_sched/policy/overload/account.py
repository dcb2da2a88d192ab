"""Requests that wait for a first seat, by level and tenant: number, tokens, age."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job


@dataclass(slots=True)
class Amount:
    """Number of requests, and their prompt and predicted output tokens."""

    requests: int = 0
    tokens: float = 0.0

    def subtract(self, tokens: float) -> None:
        """Subtract a request."""
        self.requests -= 1
        self.tokens = self.tokens - tokens if self.requests else 0.0  # clears rounding errors


class Entry(NamedTuple):
    """The values with which a request was counted; `since` is its time of arrival."""

    level: int
    tokens: float
    tenant: str
    since: float


@dataclass(slots=True)
class _Level:
    amount: Amount = field(default_factory=Amount)
    jobs: dict[Job, None] = field(default_factory=dict)  # oldest first


class QueueAccount:
    """Requests that have not had a seat yet, so without preempted ones. Operations are O(levels)
    or O(log n)."""

    def __init__(self, levels: int) -> None:
        self.all = Amount()
        self._levels = [_Level() for _ in range(levels)]
        self._tenants: dict[str, Amount] = {}
        self._entries: dict[Job, Entry] = {}
        self._deadlines: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: object) -> bool:
        return job in self._entries

    def level(self, level: int) -> Amount:
        """Waiting requests and tokens of a level."""
        return self._levels[level].amount

    def tenant(self, tenant: str) -> Amount:
        """Waiting requests and tokens of a tenant."""
        return self._tenants.get(tenant) or Amount()

    def tokens_up_to(self, level: int) -> float:
        """Waiting tokens of requests at least as urgent as a level."""
        return sum(each.amount.tokens for each in self._levels[: level + 1])

    def enter(self, job: Job, entry: Entry, timeout: float | None) -> None:
        """Add a request, as the newest of its level."""
        self._entries[job] = entry
        at, tokens, name, _ = entry
        level = self._levels[at]
        level.jobs[job] = None
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Amount()
        for amount in (self.all, level.amount, tenant):
            amount.requests += 1
            amount.tokens += tokens
        if timeout is not None:
            self._deadlines.push(job, entry.since + timeout)

    def leave(self, job: Job) -> Entry | None:
        """Remove a request and return its entry; None if it was not counted."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return None
        level = self._levels[entry.level]
        del level.jobs[job]
        level.amount.subtract(entry.tokens)
        self.all.subtract(entry.tokens)
        tenant = self._tenants[entry.tenant]
        tenant.subtract(entry.tokens)
        if not tenant.requests:
            del self._tenants[entry.tenant]
        self._deadlines.discard(job)
        return entry

    def timed_out(self, now: float) -> Iterator[Job]:
        """Requests past their timeout; the caller removes each before taking the next."""
        while (job := self._deadlines.peek()) is not None and self._deadlines.key(job) <= now:
            yield job
            self._deadlines.discard(job)

    def oldest(self, level: int) -> Job | None:
        """The oldest request of a level."""
        return next(iter(self._levels[level].jobs), None)

    def least_important(self, above: int) -> Job | None:
        """The newest of the least urgent requests below level `above`; None without one."""
        for level in reversed(self._levels[above + 1 :]):
            if level.jobs:
                return next(reversed(level.jobs))
        return None
