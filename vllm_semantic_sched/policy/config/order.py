"""Keys about the order of requests (aging, deadlines, shares, tenants, holds)."""

from __future__ import annotations

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.config.section import Section

ROUNDING = 1e-9  # by which sums of shares such as ten times 0.1 fall short of 1
STRICT_LEVEL = 1  # with weighted levels, this and more urgent levels run strictly first


class WeightedLevels(Section):
    """Order by urgency and remaining time together, among the less urgent levels."""

    factor: float | None = Field(None, gt=1)
    """A request runs before one that is one level more urgent if its remaining time is at least
    this many times shorter; two levels count as the square of it. Levels 0 and 1 run before all
    others, by urgency and then remaining time, and only they preempt. Unset: all requests run by
    urgency and then remaining time. For `base: semantic`."""


class Aging(Section):
    """Promotion of waiting requests, so that none starves."""

    enabled: bool = False
    """Promote waiting requests."""
    interval: float = Field(10.0, gt=0)
    """Seconds of waiting per level, until a request is overdue: more urgent than level 0, where
    requests run by arrival. At most one admission in ten goes to a request that overtakes a more
    urgent one."""


class Deadlines(Section):
    """Rank gained for a tier's SLO for the time to first token (`tiers[].slo.ttft`)."""

    enabled: bool = False
    """Requests whose tier has an SLO for the first token run before the rest of their level, until
    they have it or the SLO is missed."""
    stated: bool = False
    """Requests that state a deadline (`vllm_xargs: {deadline_ms: N}` or `{slo_ttft_ms: N}`) run
    before the rest of their level while they can keep it, those that must start soonest first. One
    whose `deadline_ms` cannot be kept, by its predicted wait and length, is refused. Not for `base:
    fcfs`; among weighted levels (`weighted_levels`) they count as half a level more urgent."""

    @property
    def raises(self) -> bool:
        """Whether any deadline raises requests."""
        return self.enabled or self.stated


class FairShareKnobs(Section):
    """Target shares of the engine's time (`tiers[].share`)."""

    enabled: bool = False
    """Steer toward the shares."""


class TopLevelCap(Section):
    """Limit on the share of a tenant's requests at level 0."""

    share: float = Field(1.0, gt=0, le=1)
    """Most of a tenant's requests of the last minute at level 0, as a share; always five. 1: no
    cap. Further requests are served at level 1."""


class Tenants(Section):
    """Fairness among tenants (`vllm_xargs: {tenant: NAME}`)."""

    fair: bool = False
    """Within a level serve the tenant with the least service first. Requests without a tenant count
    as one tenant."""
    seats: float = Field(1.0, gt=0, le=1)
    """Largest share of the seats that one tenant can hold, at least one seat. The rest stays free
    for other tenants. Needs `fair`. 1: no cap."""
    kv: float = Field(1.0, gt=0, le=1)
    """Largest share of the KV blocks that one tenant can hold. Requests that grow beyond it are
    preempted, except the tenant's last one. Needs `fair`. 1: no cap."""
    top: TopLevelCap = TopLevelCap()

    @model_validator(mode="after")
    def _caps_by_tenant(self) -> Tenants:
        for name, share in (("seats", self.seats), ("kv", self.kv)):
            if share < 1.0 and not self.fair:
                raise ValueError(f"tenants.{name}: {share:g} needs tenants.fair: true; valid: 1")
        return self


class KvPeakKnobs(Section):
    """Admission by the predicted peak of KV use (arXiv 2507.10150)."""

    enabled: bool = False
    """A waiting request starts only if the running requests and it will fit into the KV cache at
    every later step, by their predicted lengths. Levels 0 and 1 and overdue requests start
    regardless. Off: it starts as soon as its prompt fits, and requests are preempted when the
    answers no longer fit."""


class Protect(Section):
    """Holds: less urgent running requests sit out steps while an urgent one runs and others wait.
    They keep their seat and their KV."""

    level: int | None = Field(None, ge=0)
    """Requests of this and more urgent levels are protected. Unset: no holds."""
    price: float = Field(0.05, ge=0, lt=1)
    """Most of the engine's time, as a share of any minute of work, that holds may cost, less what
    preemptions for urgent requests cost. 0: no holds."""
    worth: float | None = Field(None, gt=0)
    """Seconds of requests of the last level that a second gained at level 0 is worth; other levels
    in proportion. Unset: by `decision.missed_cost`. The higher, the longer the queue under which
    holds and preemptions still pay."""
