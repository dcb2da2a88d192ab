"""Limits on the seats, the KV blocks and the places in the queue of tiers and tenants.

- Reservations: tiers up to level T reserve R(T), the sum of their reservations; all less urgent
  tiers together may hold total - R(T). Hard reservations enforce this at admission. Soft ones may
  be borrowed: borrowers are preempted first, even if they are protected otherwise.
- Caps: a tenant may hold a share of the seats and blocks, so that others find some free at once.
- Bounds: so many requests of a tier, of a tenant and in all may wait for a first seat.

Seats and blocks are unlimited until the engine's capacity is known. One request of any size may run
while its group has no other.
"""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.facts.capacity import (
    AHEAD,
    Allocation,
    Allocations,
    EngineCapacity,
    Need,
)
from vllm_semantic_sched.policy.facts.job import Job


class Scope(enum.Enum):
    """Whose use a limit bounds."""

    ALL = "all"
    LESS_URGENT = "less_urgent"  # all tiers less urgent than one, together
    TIER = "tier"
    TENANT = "tenant"


class Limit(NamedTuple):
    """The most that a group may have; inf: unlimited."""

    scope: Scope
    seats: float = math.inf
    kv: float = math.inf  # blocks
    queued: float = math.inf  # requests that wait for a first seat

    def admits(self, held: Allocation, blocks: int) -> bool:
        """Whether a group that holds this much may have one more request, with so many blocks."""
        if held.seats + 1 > self.seats:
            return False
        return not held.seats or held.blocks + blocks <= self.kv

    def exceeded_by(self, held: Allocation) -> bool:
        """Whether several requests of a group hold more KV than it may."""
        return held.seats > 1 and held.blocks > self.kv


_UNRESERVED = Limit(Scope.LESS_URGENT)


class LimitTable(NamedTuple):
    """All limits under a policy, those on tiers by level."""

    hard: Sequence[Limit]  # on what is less urgent than each level, by hard reservations
    soft: Sequence[Limit]  # the same by all reservations
    tiers: Sequence[Limit]
    tenant: Limit  # on each one
    all: Limit
    reserves: bool  # whether any tier reserves anything
    reserves_hard: bool
    caps_tenants: bool  # whether a tenant may reach its limit of seats or KV


class Limits(Derived[LimitTable]):
    """Applies the limits of the policy in force to what `allocations` say that each group has.
    Operations are at most O(tiers squared), and O(1) without limits."""

    def __init__(self, ref: PolicyRef, allocations: Allocations) -> None:
        self.allocations = allocations
        super().__init__(ref, self.check)

    def capacity_known(self) -> None:
        """Derive the limits from the engine's capacity. PolicyError if reservations leave nothing
        for the less urgent tiers."""
        self.refresh()

    def check(self, policy: Policy) -> LimitTable:
        """The limits under a policy; errors as in `capacity_known`."""
        tiers, capacity = policy.all_tiers, self.allocations.capacity
        hard = soft = [_UNRESERVED] * len(tiers)
        if capacity is not None:
            hard = _reserved(tiers, capacity, hard_only=True)
            soft = _reserved(tiers, capacity, hard_only=False)
        return LimitTable(
            hard,
            soft,
            tiers=[Limit(Scope.TIER, queued=_bound(tier.queue.requests)) for tier in tiers],
            tenant=_tenant_limit(policy, capacity),
            all=Limit(Scope.ALL, queued=_bound(policy.admission.queue.requests)),
            reserves=any(limit is not _UNRESERVED for limit in soft),
            reserves_hard=any(limit is not _UNRESERVED for limit in hard),
            caps_tenants=policy.tenants.seats < 1.0 or policy.tenants.kv < 1.0,
        )

    # Admission to a seat

    def admits_level(self, level: int, tokens: int) -> bool:
        """Whether hard reservations leave a request of `level` a seat and KV for these tokens."""
        table = self.table
        if not table.reserves_hard:
            return True
        blocks, below = self._blocks_for(tokens), self.allocations.below
        return all(table.hard[above].admits(below[above], blocks) for above in range(level))

    def admits_tenant(self, job: Job) -> bool:
        """Whether a waiting job's tenant may have a seat and KV for it now. O(1)."""
        table = self.table
        if not table.caps_tenants:
            return True
        held = self.allocations.tenants.get(job.tenant)
        return held is None or table.tenant.admits(held, self._blocks_for(job.tokens + AHEAD))

    def level_over_limit(self) -> int | None:
        """The most urgent level whose hard reservation others hold a part of, or None."""
        table = self.table
        if not table.reserves_hard:
            return None
        for level, (limit, held) in enumerate(zip(table.hard, self.allocations.below, strict=True)):
            if held.seats > limit.seats or limit.exceeded_by(held):
                return level
        return None

    def tenant_over_limit(self) -> str | None:
        """A tenant with several requests and more KV than its cap, in O(tenants)."""
        limit = self.table.tenant
        if limit.kv == math.inf:
            return None
        tenants = self.allocations.tenants.items()
        return next((name for name, held in tenants if limit.exceeded_by(held)), None)

    # Reservations that others have borrowed

    def lent(self, level: int) -> bool:
        """Whether less urgent tiers hold part of a reservation that `level` may claim."""
        return self.table.reserves and any(
            seats > 0 or blocks > 0 for _, seats, blocks in self._excess(level)
        )

    def borrowed_from(self, level: int) -> Callable[[Job], bool] | None:
        """A test for running jobs, to be called in eviction order: does this job hold what
        `level` may claim? Each True counts as returned. None if nothing is lent."""
        if not self.lent(level):
            return None
        excess = list(self._excess(level))

        def borrowed(job: Job) -> bool:
            holds_excess = False
            held = job.seat.blocks if job.seat is not None else 0
            for place, (above, seats, blocks) in enumerate(excess):
                if job.level > above and (seats > 0 or blocks > 0):
                    holds_excess = True
                    excess[place] = (above, seats - 1, blocks - held)
            return holds_excess

        return borrowed

    def shortage(self, level: int, tokens: int) -> Need:
        """Seats and blocks that less urgent tiers must free before `admits_level` is True."""
        seats, blocks = 0.0, 0.0
        table = self.table
        if table.reserves_hard:
            wanted = self._blocks_for(tokens)
            for above in range(level):
                limit, held = table.hard[above], self.allocations.below[above]
                seats = max(seats, held.seats + 1 - limit.seats)
                blocks = max(blocks, held.blocks + wanted - limit.kv)
        return Need(math.ceil(seats), math.ceil(blocks))

    def _blocks_for(self, tokens: int) -> int:
        capacity = self.allocations.capacity
        return capacity.blocks_for(tokens) if capacity is not None else 0

    def _excess(self, level: int) -> Iterator[tuple[int, float, float]]:
        """Tiers whose reservation `level` may claim, with the seats and blocks by which less
        urgent tiers exceed their limit."""
        tiers = self._ref.policy.all_tiers
        for above, limit in enumerate(self.table.soft[level:], start=level):
            reserve, held = tiers[above].reserve, self.allocations.below[above]
            if reserve.seats or reserve.kv:
                yield above, held.seats - limit.seats, held.blocks - limit.kv


def _bound(requests: int | None) -> float:
    return math.inf if requests is None else requests


def _tenant_limit(policy: Policy, capacity: EngineCapacity | None) -> Limit:
    caps, seats, blocks = policy.tenants, math.inf, math.inf
    if capacity is not None:
        if caps.seats < 1.0:
            seats = max(1, int(caps.seats * capacity.seats))
        if caps.kv < 1.0 and capacity.blocks is not None:
            blocks = caps.kv * capacity.blocks
    return Limit(Scope.TENANT, seats, blocks, _bound(policy.admission.tenant.requests))


def _reserved(tiers: Sequence[Tier], capacity: EngineCapacity, hard_only: bool) -> list[Limit]:
    limits: list[Limit] = []
    seats, share = 0, 0.0
    for level, tier in enumerate(tiers):
        if not hard_only or tier.reserve.mode == "hard":
            seats += tier.reserve.seats
            share += tier.reserve.kv
        if (not seats and not share) or level == len(tiers) - 1:
            limits.append(_UNRESERVED)
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
        limits.append(Limit(Scope.LESS_URGENT, capacity.seats - seats, blocks))
    return limits
