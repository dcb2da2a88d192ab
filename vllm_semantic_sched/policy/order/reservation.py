"""Seats and KV blocks that tiers reserve for themselves and more urgent ones.

Tiers up to level T reserve R(T), the sum of their reservations; all less urgent tiers together may
hold total - R(T). Hard reservations enforce this at admission. Soft ones may be borrowed: borrowers
are preempted first, even if they are protected otherwise.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity, Holdings, Need
from vllm_semantic_sched.policy.facts.job import Job


class Limit(NamedTuple):
    """Seats and KV blocks that all tiers less urgent than one may hold together."""

    seats: float
    blocks: float


class Limits(NamedTuple):
    """What all tiers less urgent than each may hold."""

    hard: Sequence[Limit]  # by hard reservations
    soft: Sequence[Limit]  # by all
    enabled: bool  # whether any limit is finite
    has_hard: bool


_UNLIMITED = Limit(math.inf, math.inf)


class Reservation:
    """Limits on the seats and blocks of tiers. Operations are at most O(tiers squared), and O(1)
    without reservations."""

    def __init__(self, ref: PolicyRef, holdings: Holdings) -> None:
        self._ref = ref
        self._holdings = holdings
        self._limits = Derived(ref, self.check)

    def capacity_known(self) -> None:
        """Derive the limits from the engine's capacity, without which nothing is reserved.
        PolicyError if they leave nothing for the less urgent tiers."""
        self._limits.refresh()

    def check(self, policy: Policy) -> Limits:
        """The limits under a policy; errors as in `capacity_known`."""
        tiers, capacity = policy.all_tiers, self._holdings.capacity
        if capacity is None:
            hard = soft = [_UNLIMITED] * len(tiers)
        else:
            hard = _limits(tiers, capacity, hard_only=True)
            soft = _limits(tiers, capacity, hard_only=False)
        return Limits(
            hard,
            soft,
            enabled=any(limit is not _UNLIMITED for limit in soft),
            has_hard=any(limit is not _UNLIMITED for limit in hard),
        )

    @property
    def enabled(self) -> bool:
        """Whether any tier reserves anything."""
        return self._limits.table.enabled

    @property
    def has_hard(self) -> bool:
        return self._limits.table.has_hard

    @property
    def soft(self) -> Sequence[Limit]:
        """What all tiers less urgent than each may hold without borrowing."""
        return self._limits.table.soft

    def admits(self, level: int, tokens: int) -> bool:
        """Whether a request may take a seat and KV for this many tokens. One that alone exceeds its
        limit of blocks may run when no other one does."""
        limits = self._limits.table
        if not limits.has_hard:
            return True
        blocks = self._blocks_for(tokens)
        for above in range(level):
            limit, held = limits.hard[above], self._holdings.below[above]
            if held.seats + 1 > limit.seats:
                return False
            if held.seats and held.blocks + blocks > limit.blocks:
                return False
        return True

    def over_limit(self) -> int | None:
        """The most urgent level whose hard reservation others hold a part of, or None."""
        if not self.has_hard:
            return None
        for level, limit in enumerate(self._limits.table.hard):
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
            hard, wanted = self._limits.table.hard, self._blocks_for(tokens)
            for above in range(level):
                limit, held = hard[above], self._holdings.below[above]
                seats = max(seats, held.seats + 1 - limit.seats)
                blocks = max(blocks, held.blocks + wanted - limit.blocks)
        return Need(math.ceil(seats), math.ceil(blocks))

    def _blocks_for(self, tokens: int) -> int:
        capacity = self._holdings.capacity
        return capacity.blocks_for(tokens) if capacity is not None else 0

    def _excess(self, level: int) -> Iterator[tuple[int, float, float]]:
        """Tiers whose reservation `level` may claim, with the seats and blocks by which less
        urgent tiers exceed their limit."""
        tiers = self._ref.policy.all_tiers
        for above, limit in enumerate(self.soft[level:], start=level):
            reserve, held = tiers[above].reserve, self._holdings.below[above]
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
