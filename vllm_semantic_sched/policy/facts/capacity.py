"""Seats, KV blocks and places in the queue: what the engine has, and what each group has of it."""

from collections import defaultdict
from dataclasses import dataclass

from vllm_semantic_sched.policy.facts.job import Job, Seat

AHEAD = 64
"""Tokens of KV that a job is counted with beyond its own, and between two visits of the meter: 256
running jobs cost four visits per step."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """Seats and KV blocks of the engine."""

    seats: int
    blocks: int | None  # None: unlimited
    block_size: int = 16

    def blocks_for(self, tokens: int) -> int:
        """KV blocks for this many tokens of one request."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Need:
    """Seats and KV blocks missing before a job can be admitted; 0 or below: enough."""

    seats: int
    blocks: int

    @property
    def met(self) -> bool:
        """Whether neither is missing."""
        return self.seats <= 0 and self.blocks <= 0


@dataclass(slots=True)
class Allocation:
    """What the jobs of a group, a level or a tenant, have."""

    seats: int = 0
    blocks: int = 0
    tokens: float = 0.0  # KV tokens that they are predicted to need in the end
    queued: int = 0  # those of them that wait for a first seat
    queued_tokens: float = 0.0  # and their prompt and predicted output tokens, of a level

    def add(self, seats: int, blocks: int, tokens: float) -> None:
        """Change all three; negative to give back."""
        self.seats += seats
        self.blocks += blocks
        self.tokens = self.tokens + tokens if self.seats else 0.0  # clears rounding errors


class Allocations:
    """Gives jobs their `seat` record, and sums up what they hold, in all, by level and by tenant.
    Changes are O(levels).

    A job holds a seat from when it is taken out of the queue until it loses it, and counts at its
    own level, without what it gained by waiting. Its blocks are those that the meter reported last:
    up to `AHEAD` tokens too many, and shared blocks count for each job, to be safe. What is queued
    is counted by `overload.account.QueueAccount`, where there is one.
    """

    def __init__(self, levels: int) -> None:
        self.capacity: EngineCapacity | None = None  # until it is known, jobs count without blocks
        self.all = Allocation()
        self.levels = [Allocation() for _ in range(levels)]
        # What all jobs less urgent than each level hold; `tokens` stays 0.
        self.below = [Allocation() for _ in range(levels)]
        self.tenants: defaultdict[str, Allocation] = defaultdict(Allocation)

    def __len__(self) -> int:
        return self.all.seats

    def occupy(self, job: Job, tokens: int) -> Seat:
        """Record that a job has, or is about to get, a seat and KV for this many tokens."""
        blocks = self.capacity.blocks_for(tokens) if self.capacity is not None else 0
        seat = job.seat or Seat(blocks=0)
        self._add(job, int(job.seat is None), blocks - seat.blocks, 0.0)
        job.seat, seat.blocks = seat, blocks
        return seat

    def expect(self, job: Job, tokens: float) -> None:
        """Record how many KV tokens a job is predicted to need; no-op without a seat."""
        seat = job.seat
        if seat is not None:
            self._add(job, 0, 0, tokens - seat.expected)
            seat.expected = tokens

    def release(self, job: Job) -> None:
        """Take back the seat of a job; no-op if it has none."""
        seat, job.seat = job.seat, None
        if seat is not None:
            self._add(job, -1, -seat.blocks, -seat.expected)
            self.forget(job.tenant)

    def relevel(self, job: Job, before: int) -> None:
        """Move a job's allocations from level `before` to `job.level`."""
        seat = job.seat
        if seat is not None:
            self._add_to_level(before, -1, -seat.blocks, -seat.expected)
            self._add_to_level(job.level, 1, seat.blocks, seat.expected)

    def forget(self, tenant: str) -> None:
        """Drop the record of a tenant that has nothing."""
        held = self.tenants[tenant]
        if not held.seats and not held.queued:
            del self.tenants[tenant]

    def _add(self, job: Job, seats: int, blocks: int, tokens: float) -> None:
        self.all.add(seats, blocks, tokens)
        self._add_to_level(job.level, seats, blocks, tokens)
        self.tenants[job.tenant].add(seats, blocks, tokens)

    def _add_to_level(self, level: int, seats: int, blocks: int, tokens: float) -> None:
        self.levels[level].add(seats, blocks, tokens)
        for above in range(level):
            self.below[above].add(seats, blocks, 0.0)
