"""Caps on the seats and KV blocks that one tenant holds, so that others find some free at once."""

from __future__ import annotations

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.meter import AHEAD
from vllm_semantic_sched.policy.order.reservation import EngineCapacity, Held
from vllm_semantic_sched.policy.order.tenants import Tenants


class TenantCaps:
    """Who holds how much, and who may take more. O(1), but for the rare tenant over its cap.

    Blocks are counted as `Reservation` counts them. A tenant may always have one request, however
    large.

    Attributes:
        knobs: as given; may be changed.
        capacity: of the engine; None until it is told, and then nobody is bounded.
    """

    def __init__(self, knobs: Tenants) -> None:
        self.knobs = knobs
        self.capacity: EngineCapacity | None = None
        self._places: dict[Job, tuple[str, int]] = {}
        self._held: dict[str, Held] = {}

    def hold(self, job: Job, tokens: int) -> None:
        """A job has a seat and KV for so many tokens; 0 tokens: neither any more."""
        tenant, blocks = self._places.pop(job, ("", 0))
        held = self._held.get(tenant)
        if blocks and held is not None:
            held.seats -= 1
            held.blocks -= blocks
            if not held.seats:
                del self._held[tenant]
        if tokens and self.capacity is not None:
            blocks = self.capacity.blocks_for(tokens)
            self._places[job] = (job.tenant, blocks)
            held = self._held.setdefault(job.tenant, Held())
            held.seats += 1
            held.blocks += blocks

    def admits(self, job: Job) -> bool:
        """Whether a waiting job's tenant may have a seat and KV for it now."""
        held = self._held.get(job.tenant)
        if held is None or self.capacity is None:
            return True
        share = self.knobs.seats
        if share < 1.0 and held.seats >= int(share * self.capacity.seats):
            return False
        limit = self._blocks
        needed = self.capacity.blocks_for(job.tokens + AHEAD)
        return limit is None or held.blocks + needed <= limit

    def over_limit(self) -> str | None:
        """A tenant with several requests that grew beyond its part of the KV blocks together;
        None if there is none. O(tenants with a seat)."""
        limit = self._blocks
        if limit is None:
            return None
        over = (name for name, held in self._held.items() if held.seats > 1 and held.blocks > limit)
        return next(over, None)

    @property
    def _blocks(self) -> float | None:
        if self.knobs.kv >= 1.0 or self.capacity is None or self.capacity.blocks is None:
            return None
        return self.knobs.kv * self.capacity.blocks
