"""Seats and KV blocks: what the engine has, what a job needs, and what each job holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_semantic_sched.policy.facts.job import Job


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the engine has; `blocks` None if they never run out."""

    seats: int
    blocks: int | None
    block_size: int = 16

    def blocks_for(self, tokens: int) -> int:
        """KV blocks for so many tokens of one request."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Need:
    """What is missing before a job can be admitted; zero or below where there is enough.

    Attributes:
        seats: running-request slots.
        blocks: KV blocks.
    """

    seats: int
    blocks: int

    @property
    def met(self) -> bool:
        return self.seats <= 0 and self.blocks <= 0


@dataclass(slots=True)
class Held:
    """Seats and KV blocks held together by the jobs of a level or of a tenant.

    Attributes:
        tokens: KV tokens that those jobs are predicted to need in the end.
    """

    seats: int = 0
    blocks: int = 0
    tokens: float = 0.0

    def add(self, seats: int, blocks: int, tokens: float) -> None:
        """Change all three; negative where something is given back."""
        self.seats += seats
        self.blocks += blocks
        self.tokens = self.tokens + tokens if self.seats else 0.0  # no rounding is left over


@dataclass(slots=True)
class _Holding:
    blocks: int
    tokens: float = 0.0


class Holdings:
    """What every job with a seat holds. The only record of it: reservations, tenant caps, load and
    metrics ask here. All operations are O(1) but `below`, which is O(levels).

    A job counts from the moment it is taken out of the queue to get a seat until it loses the
    seat. Blocks are those that the meter reported last: up to `order.meter.AHEAD` tokens more
    than the job holds, and shared ones count for each job that shares them, so that limits err on
    the safe side. A job counts at its own level, whatever it gained by waiting.

    Attributes:
        capacity: of the engine; None until it is known, and then jobs hold no blocks.
    """

    def __init__(self, levels: int) -> None:
        self.capacity: EngineCapacity | None = None
        self._jobs: dict[Job, _Holding] = {}
        self._levels = [Held() for _ in range(levels)]
        self._tenants: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def blocks(self, job: Job) -> int:
        """KV blocks of one job; 0 if it has no seat."""
        held = self._jobs.get(job)
        return held.blocks if held is not None else 0

    def level(self, level: int) -> Held:
        """What the jobs of one level hold."""
        return self._levels[level]

    def levels(self) -> list[Held]:
        """What the jobs of each level hold, most urgent first."""
        return self._levels

    def below(self, level: int) -> Held:
        """What all jobs less urgent than `level` hold together."""
        total = Held()
        for held in self._levels[level + 1 :]:
            total.seats += held.seats
            total.blocks += held.blocks
        return total

    def tenant(self, tenant: str) -> Held | None:
        """What the jobs of one tenant hold; None if it has no seat."""
        return self._tenants.get(tenant)

    def tenants(self) -> Iterator[tuple[str, Held]]:
        """What each tenant with a seat holds."""
        return iter(self._tenants.items())

    def hold(self, job: Job, tokens: int) -> None:
        """A job has, or is about to get, a seat and KV for so many tokens."""
        blocks = self.capacity.blocks_for(tokens) if self.capacity is not None else 0
        holding = self._jobs.get(job)
        if holding is None:
            self._jobs[job] = _Holding(blocks)
            self._add(job, 1, blocks, 0.0)
        else:
            self._add(job, 0, blocks - holding.blocks, 0.0)
            holding.blocks = blocks

    def expect(self, job: Job, tokens: float) -> None:
        """A job with a seat is predicted to need KV for so many tokens in the end."""
        holding = self._jobs.get(job)
        if holding is not None:
            self._add(job, 0, 0, tokens - holding.tokens)
            holding.tokens = tokens

    def release(self, job: Job) -> None:
        """A job has no seat any more; no-op if it had none."""
        holding = self._jobs.pop(job, None)
        if holding is not None:
            self._add(job, -1, -holding.blocks, -holding.tokens)
            if not self._tenants[job.tenant].seats:
                del self._tenants[job.tenant]

    def relevel(self, job: Job, before: int) -> None:
        """The level of a job was `before` and is `job.level` now."""
        holding = self._jobs.get(job)
        if holding is not None:
            self._levels[before].add(-1, -holding.blocks, -holding.tokens)
            self._levels[job.level].add(1, holding.blocks, holding.tokens)

    def _add(self, job: Job, seats: int, blocks: int, tokens: float) -> None:
        self._levels[job.level].add(seats, blocks, tokens)
        tenant = self._tenants.get(job.tenant)
        if tenant is None:
            tenant = self._tenants[job.tenant] = Held()
        tenant.add(seats, blocks, tokens)
