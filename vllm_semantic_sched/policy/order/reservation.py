"""Seats and KV blocks that tiers reserve for themselves and more urgent ones.

Tiers up to level T reserve R(T), the sum of their reservations; all less urgent tiers together may
hold total - R(T). Hard reservations enforce this at admission. Soft ones may be borrowed: borrowers
are preempted first, even if they are protected otherwise.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity, Holdings, Need
from vllm_semantic_sched.policy.facts.job import Job


class Limit(NamedTuple):
    """Seats and KV blocks that all tiers less urgent than one may hold together."""

    seats: float
    blocks: float


_UNLIMITED = Limit(math.inf, math.inf)


class Reservation:
    """Limits on the seats and blocks of tiers. Operations are at most O(tiers squared), and O(1)
    without reservations."""

    def __init__(self, tiers: Sequence[Tier], holdings: Holdings) -> None:
        self._holdings = holdings
        self.adopt(tiers)

    def adopt(self, tiers: Sequence[Tier]) -> None:
        """Switch to other tiers, or to the engine's capacity, without which nothing is reserved.
        PolicyError, with no effect, if they leave nothing for the less urgent ones."""
        self._hard, self.soft = self.check(tiers)
        self._tiers = tiers
        self.enabled = any(limit is not _UNLIMITED for limit in self.soft)
        self.has_hard = any(limit is not _UNLIMITED for limit in self._hard)

    def check(self, tiers: Sequence[Tier]) -> tuple[list[Limit], list[Limit]]:
        """The limits below each tier by hard reservations and by all; errors as in `adopt`."""
        capacity = self._holdings.capacity
        if capacity is None:
            return [_UNLIMITED] * len(tiers), [_UNLIMITED] * len(tiers)
        return _limits(tiers, capacity, hard_only=True), _limits(tiers, capacity, hard_only=False)

    def admits(self, level: int, tokens: int) -> bool:
        """Whether a request may take a seat and KV for this many tokens. One that alone exceeds its
        limit of blocks may run when no other one does."""
        if not self.has_hard:
            return True
        blocks = self._blocks_for(tokens)
        for above in range(level):
            limit, held = self._hard[above], self._holdings.below[above]
            if held.seats + 1 > limit.seats:
                return False
            if held.seats and held.blocks + blocks > limit.blocks:
                return False
        return True

    def over_limit(self) -> int | None:
        """The most urgent level whose hard reservation others hold a part of, or None."""
        if not self.has_hard:
            return None
        for level, limit in enumerate(self._hard):
            held = self._holdings.below[level]
            if held.seats > limit.seats or (held.seats > 1 and held.blocks > limit.blocks):
                return level
        return None

    def lent(self, level: int) -> bool:
        """Whether less urgent tiers hold part of a reservation that `level` may claim."""
        return self.enabled and any(
            seats > 0 or blocks > 0 for _, seats, blocks in self._excess(level)
        )

    def borrowed_from(self, level: int) -> Callable[[Job], bool] | None:
        """A test for running jobs, to be called in eviction order: does this job hold what
        `level` may claim? Each True counts as returned. None if nothing is lent."""
        if not self.lent(level):
            return None
        excess = list(self._excess(level))

        def borrowed(job: Job) -> bool:
            found, held = False, job.seat.blocks if job.seat is not None else 0
            for place, (above, seats, blocks) in enumerate(excess):
                if job.level > above and (seats > 0 or blocks > 0):
                    found = True
                    excess[place] = (above, seats - 1, blocks - held)
            return found

        return borrowed

    def shortage(self, level: int, tokens: int) -> Need:
        """Seats and blocks that less urgent tiers must free before `admits` is True."""
        seats, blocks = 0.0, 0.0
        if self.has_hard:
            wanted = self._blocks_for(tokens)
            for above in range(level):
                limit, held = self._hard[above], self._holdings.below[above]
                seats = max(seats, held.seats + 1 - limit.seats)
                blocks = max(blocks, held.blocks + wanted - limit.blocks)
        return Need(math.ceil(seats), math.ceil(blocks))

    def _blocks_for(self, tokens: int) -> int:
        capacity = self._holdings.capacity
        return capacity.blocks_for(tokens) if capacity is not None else 0

    def _excess(self, level: int) -> Iterator[tuple[int, float, float]]:
        """Tiers whose reservation `level` may claim, with the seats and blocks by which less
        urgent tiers exceed their limit."""
        for above, limit in enumerate(self.soft[level:], start=level):
            reserve, held = self._tiers[above].reserve, self._holdings.below[above]
            if reserve.seats or reserve.kv:
                yield above, held.seats - limit.seats, held.blocks - limit.blocks


def _limits(tiers: Sequence[Tier], capacity: EngineCapacity, hard_only: bool) -> list[Limit]:
    limits: list[Limit] = []
    seats, share = 0, 0.0
    for level, tier in enumerate(tiers):
        if not hard_only or tier.reserve.mode == "hard":
            seats += tier.reserve.seats
            share += tier.reserve.kv
        if (not seats and not share) or level == len(tiers) - 1:
            limits.append(_UNLIMITED)
            continue
        if seats >= capacity.seats or share >= 1.0:
            raise PolicyError(
                f"tiers.{level}.reserve: tiers up to {tier.name!r} reserve {seats} seats and "
                f"{share:g} of the KV blocks, which leaves none for the others; the engine has "
                f"{capacity.seats} seats"
            )
        blocks = math.inf
        if share and capacity.blocks is not None:
            blocks = capacity.blocks * (1.0 - share)
        limits.append(Limit(capacity.seats - seats, blocks))
    return limits
