"""Seats and KV blocks that tiers keep for themselves and more urgent ones (S8).

Tiers up to level T reserve R(T), the sum of their own reservations. All less urgent tiers
together may then hold what is left, total - R(T). That limit holds for each T at once. A hard
reservation makes it a limit of admission; over a soft one the others may borrow, and what they
borrowed is taken back first, whatever protects them otherwise.

A request counts at its own level: promotion changes who goes first, not whose capacity it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.eviction.preemption import Need
from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.overload.tiers import Tier


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the engine has; `blocks` None if they never run out."""

    seats: int
    blocks: int | None
    block_size: int = 16

    def blocks_for(self, tokens: int) -> int:
        """KV blocks for so many tokens of one request."""
        return -(-tokens // self.block_size)


@dataclass(slots=True)
class Held:
    """Seats and KV blocks, held or allowed, of all tiers less urgent than one."""

    seats: float = 0
    blocks: float = 0


class Reservation:
    """Who holds how much, and who may take more. Everything is O(tiers).

    Blocks are those told by the meter: up to `meter.AHEAD` tokens more than a request holds, and
    shared ones counted for each that shares them, so that a reservation errs on the safe side.

    Raises:
        PolicyError: from `set_capacity` and `set_tiers`, if a reservation leaves the other tiers
            nothing; what was in force stays so.

    Attributes:
        enabled: whether anything is reserved.
        has_hard: whether any of it is a hard reservation.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers
        self.capacity: EngineCapacity | None = None
        self._places: dict[Job, tuple[int, int]] = {}
        # By tier T: what all less urgent tiers hold together, and may hold.
        self._held = [Held() for _ in tiers]
        self.enabled = self.has_hard = False
        self._hard: list[Held | None] = [None] * len(tiers)
        self._soft: list[Held | None] = [None] * len(tiers)

    def set_capacity(self, capacity: EngineCapacity) -> None:
        """Tell what there is to reserve from."""
        self._set(self.tiers, capacity)

    def check(self, tiers: Sequence[Tier]) -> None:
        """Raise what `set_tiers` would."""
        if self.capacity is not None:
            _limits(tiers, self.capacity, hard_only=False)

    def set_tiers(self, tiers: Sequence[Tier]) -> None:
        """Reserve otherwise from now on; as many tiers as before."""
        if self.capacity is not None:
            self._set(tiers, self.capacity)

    def held_below(self, level: int) -> Held:
        """What all tiers less urgent than `level` hold together."""
        return self._held[level]

    def limit_below(self, level: int, hard: bool) -> Held | None:
        """What they may hold; None if `level` and more urgent tiers reserve nothing."""
        return (self._hard if hard else self._soft)[level]

    def hold(self, job: Job, tokens: int) -> None:
        """A job has a seat and KV for so many tokens; 0 tokens: neither any more. Its level is
        read anew, so telling again moves a job whose level changed."""
        old = self._places.pop(job, None)
        if old is not None:
            self._add(old[0], -1, -old[1])
        if tokens:
            blocks = self.capacity.blocks_for(tokens) if self.capacity is not None else 0
            self._places[job] = (job.level, blocks)
            self._add(job.level, 1, blocks)

    def relevel(self, job: Job) -> None:
        """The level of a job may have changed."""
        old = self._places.get(job)
        if old is not None and old[0] != job.level:
            self._add(old[0], -1, -old[1])
            self._places[job] = (job.level, old[1])
            self._add(job.level, 1, old[1])

    def admits(self, level: int, tokens: int) -> bool:
        """Whether a request of that level may take a seat and KV for so many tokens.

        One that alone exceeds its limit of blocks is let in when no other is there: it could
        never run otherwise.
        """
        if not self.has_hard:
            return True
        blocks = self.capacity.blocks_for(tokens) if self.capacity is not None else 0
        for above in range(level):
            limit, held = self._hard[above], self._held[above]
            if limit is None:
                continue
            if held.seats + 1 > limit.seats:
                return False
            if held.seats and held.blocks + blocks > limit.blocks:
                return False
        return True

    def over_limit(self) -> int | None:
        """The most urgent level whose hard reservation others hold part of, because a request
        grew or turned out to be less urgent; None if there is none."""
        if not self.has_hard:
            return None
        for level, limit in enumerate(self._hard):
            held = self._held[level]
            if limit is not None and (
                held.seats > limit.seats or (held.seats > 1 and held.blocks > limit.blocks)
            ):
                return level
        return None

    def lent(self, level: int) -> bool:
        """Whether less urgent tiers hold part of what `level` may claim."""
        if not self.enabled:
            return False
        return any(seats > 0 or blocks > 0 for _, seats, blocks in self._excess(level))

    def borrowed_from(self, level: int) -> Callable[[Job], bool] | None:
        """Says of running jobs, asked in the order of eviction, whether they sit on what `level`
        may claim; each yes counts as given back. None if nothing is lent."""
        if not self.lent(level):
            return None
        excess = list(self._excess(level))

        def borrowed(job: Job) -> bool:
            found = False
            for place, (above, seats, blocks) in enumerate(excess):
                if job.level > above and (seats > 0 or blocks > 0):
                    found = True
                    held = self._places[job][1] if job in self._places else 0
                    excess[place] = (above, seats - 1, blocks - held)
            return found

        return borrowed

    def shortage(self, level: int, tokens: int) -> Need:
        """Seats and blocks that less urgent tiers must give up before `admits` says yes."""
        seats, blocks = 0.0, 0.0
        if self.has_hard and self.capacity is not None:
            wanted = self.capacity.blocks_for(tokens)
            for above in range(level):
                limit, held = self._hard[above], self._held[above]
                if limit is not None:
                    seats = max(seats, held.seats + 1 - limit.seats)
                    blocks = max(blocks, held.blocks + wanted - limit.blocks)
        return Need(math.ceil(seats), math.ceil(blocks))

    def _excess(self, level: int) -> Iterator[tuple[int, float, float]]:
        """Tiers T whose reservation `level` may claim, and seats and blocks by which less urgent
        ones exceed what they may hold."""
        for above, limit in enumerate(self._soft[level:], start=level):
            reserve = self.tiers[above].reserve
            if limit is not None and (reserve.seats or reserve.kv):
                held = self._held[above]
                yield above, held.seats - limit.seats, held.blocks - limit.blocks

    def _set(self, tiers: Sequence[Tier], capacity: EngineCapacity) -> None:
        hard = _limits(tiers, capacity, hard_only=True)
        soft = _limits(tiers, capacity, hard_only=False)
        self.tiers, self.capacity, self._hard, self._soft = tiers, capacity, hard, soft
        self.enabled = any(limit is not None for limit in soft)
        self.has_hard = any(limit is not None for limit in hard)

    def _add(self, level: int, seats: int, blocks: int) -> None:
        for above in range(level):
            self._held[above].seats += seats
            self._held[above].blocks += blocks


def _limits(tiers: Sequence[Tier], capacity: EngineCapacity, hard_only: bool) -> list[Held | None]:
    limits: list[Held | None] = []
    seats, share = 0, 0.0
    for level, tier in enumerate(tiers):
        reserve = tier.reserve
        if not hard_only or reserve.mode == "hard":
            seats += reserve.seats
            share += reserve.kv
        if (not seats and not share) or level == len(tiers) - 1:
            limits.append(None)
            continue
        if seats >= capacity.seats or share >= 1.0:
            raise PolicyError(
                f"tiers.{level}.reserve: up to tier {tier.name!r} {seats} seats and {share:g} of "
                f"the KV blocks are reserved, which leaves the others none; the engine has "
                f"{capacity.seats} seats"
            )
        blocks = float("inf") if capacity.blocks is None else capacity.blocks * (1.0 - share)
        limits.append(Held(capacity.seats - seats, blocks if share else float("inf")))
    return limits
