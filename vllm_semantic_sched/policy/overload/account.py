"""Requests that wait for a first seat: number, tokens, age, and which is least important."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job


@dataclass(slots=True)
class Amount:
    """Requests, and the tokens that they are predicted to need: prompts and outputs."""

    requests: int = 0
    tokens: float = 0.0

    def add(self, tokens: float) -> None:
        """One request more."""
        self.requests += 1
        self.tokens += tokens

    def take(self, tokens: float) -> None:
        """One request less."""
        self.requests -= 1
        self.tokens = self.tokens - tokens if self.requests else 0.0  # no rounding is left over


@dataclass(frozen=True, slots=True)
class Entry:
    """What a request was counted as when it came in.

    Attributes:
        since: when it arrived.
    """

    level: int
    tokens: float
    tenant: str
    since: float


@dataclass(slots=True)
class _Level:
    amount: Amount = field(default_factory=Amount)
    jobs: dict[Job, None] = field(default_factory=dict)  # oldest first


class QueueAccount:
    """Requests that have arrived and have not had a seat. Preempted ones are not among them: they
    were let in before. Everything is O(levels) or O(log n)."""

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
        """What waits of one level."""
        return self._levels[level].amount

    def tenant(self, tenant: str) -> Amount:
        """What waits of one tenant."""
        return self._tenants.get(tenant) or Amount()

    def tokens_up_to(self, level: int) -> float:
        """Tokens of requests that are at least as urgent as a level."""
        return sum(each.amount.tokens for each in self._levels[: level + 1])

    def enter(self, job: Job, entry: Entry, timeout: float | None) -> None:
        """A request begins to wait; it is the newest of its level."""
        self._entries[job] = entry
        level = self._levels[entry.level]
        level.jobs[job] = None
        level.amount.add(entry.tokens)
        self.all.add(entry.tokens)
        self._tenants.setdefault(entry.tenant, Amount()).add(entry.tokens)
        if timeout is not None:
            self._deadlines.push(job, entry.since + timeout)

    def leave(self, job: Job) -> Entry | None:
        """A request waits no more; what it was counted as, None if it was not there."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return None
        level = self._levels[entry.level]
        del level.jobs[job]
        level.amount.take(entry.tokens)
        self.all.take(entry.tokens)
        tenant = self._tenants[entry.tenant]
        tenant.take(entry.tokens)
        if not tenant.requests:
            del self._tenants[entry.tenant]
        self._deadlines.discard(job)
        return entry

    def timed_out(self, now: float) -> Iterator[Job]:
        """Requests whose deadline has passed; the caller lets each leave before the next."""
        while (job := self._deadlines.peek()) is not None and self._deadlines.key(job) <= now:
            yield job
            self._deadlines.discard(job)

    def oldest(self, level: int) -> Job | None:
        """The request of a level that came in first."""
        return next(iter(self._levels[level].jobs), None)

    def least_important(self, above: int) -> Iterator[tuple[Job, Entry]]:
        """Requests less urgent than level `above`, least urgent first, of a level the newest
        first; lazily. The account must not change meanwhile."""
        for level in reversed(self._levels[above + 1 :]):
            for job in reversed(level.jobs):
                yield job, self._entries[job]
