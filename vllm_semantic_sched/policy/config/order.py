"""Keys about what runs next: aging, deadlines, shares, tenants, stages."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.facts.section import Section

# Sums of shares such as ten times 0.1 fall short of 1 by rounding.
ROUNDING = 1e-9


class Aging(Section):
    """Promotion of requests that wait, so that none starves."""

    enabled: bool = Field(False, description="Promote at all.")
    interval: float = Field(10.0, gt=0, description="Seconds of waiting per promotion.")
    step: float = Field(
        1.0,
        gt=0,
        description="Levels per promotion. Fractions order requests of the same level by waiting "
        "time; whole levels keep the shortest first within a level for longer.",
    )
    cap: int | None = Field(
        None,
        ge=1,
        description="Promotions of one request at most. Unset: until it is overdue, above level "
        "0, where requests go by arrival. With too small a cap there is no bound on the wait.",
    )
    share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Share of the admissions that may go to requests which only their age puts "
        "before more urgent ones.",
    )

    def promotions_to_overdue(self, level: int) -> int:
        """Promotions after which a request of that level is overdue, whatever the cap."""
        return math.ceil((level + 1) / self.step - ROUNDING)

    def seconds_to_overdue(self, level: int) -> float | None:
        """Waiting time after which a request of that level is overdue; None: never."""
        needed = self.promotions_to_overdue(level)
        if not self.enabled or (self.cap is not None and self.cap < needed):
            return None
        return self.interval * needed

    def most_promotions(self, level: int) -> int:
        """Promotions that a request of that level can get."""
        needed = self.promotions_to_overdue(level)
        return needed if self.cap is None else min(self.cap, needed)

    @property
    def admissions_per_overtaking(self) -> int:
        """N: of so many admissions in a row one can go to the oldest overdue request."""
        return math.ceil(1.0 / self.share - ROUNDING)

    def wait_bound(
        self, level: int, older: int, admission_gap: float, seat_seconds: float = 0.0
    ) -> float | None:
        """Seconds to the first seat at most, see the module; None if there is no bound.

        Args:
            older: q, older requests that wait on arrival.
            admission_gap: T.
            seat_seconds: S, where other tiers have hard reservations.
        """
        waited = self.seconds_to_overdue(level)
        if waited is None:
            return None
        return waited + (older + 1) * (
            self.admissions_per_overtaking * admission_gap + seat_seconds
        )


class Deadlines(Section):
    """Rank gained shortly before a tier's time to first token (`tiers[].slo.ttft`) runs out."""

    enabled: bool = Field(False, description="Look at deadlines at all.")
    levels: float = Field(
        0.5,
        gt=0,
        description="Levels gained, up to level 0, whose own requests then go before the others "
        "of it. Below 1 a request goes before the others of its own level only.",
    )
    before: float = Field(
        0.5,
        gt=0,
        le=1,
        description="How long before the deadline, as a share of the promised time. Once it is "
        "missed the gain is lost: others can still be in time.",
    )


class FairShareKnobs(Section):
    """Target shares of the engine's time (`tiers[].share`)."""

    enabled: bool = Field(False, description="Steer towards the shares.")
    window: float = Field(
        30.0, gt=0, description="Seconds over which use is remembered, decaying exponentially."
    )
    max_levels: float = Field(
        1.0,
        gt=0,
        description="Levels that a tier can gain below its share, and lose above it. To reach its "
        "share under saturation a tier must gain, and the others lose, enough to meet.",
    )
    tolerance: float = Field(
        0.1,
        gt=0,
        description="Relative distance from the share at which the whole gain or loss applies.",
    )


class TopLevelCap(Section):
    """Most of a tenant's requests that may be at the top levels."""

    share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a tenant's own requests in the window. 1: no cap. What exceeds it "
        "is served at the next level.",
    )
    levels: int = Field(1, ge=1, description="Levels that count as top, from 0 on.")
    window: float = Field(60.0, gt=0, description="Seconds of the sliding window.")
    allowance: int = Field(
        5, ge=0, description="Requests at the top in the window that a tenant may always have."
    )


class Tenants(Section):
    """Who a request belongs to (`vllm_xargs: {tenant: NAME}`), and fairness among tenants."""

    fair: bool = Field(
        False,
        description="Within a level the tenant that was served least goes first. Requests "
        "without a tenant share one.",
    )
    seats: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the seats that one tenant can hold, one at least: what is left is "
        "free at once for whoever comes next. Needs `fair`; requests without a tenant share one "
        "bound. 1: no cap.",
    )
    kv: float = Field(
        1.0,
        gt=0,
        le=1,
        description="The same of the KV blocks. Requests of a tenant that grow beyond it are "
        "preempted until one is left. Needs `fair`. 1: no cap.",
    )
    top: TopLevelCap = TopLevelCap()

    @model_validator(mode="after")
    def _caps_by_tenant(self) -> Tenants:
        for name, share in (("seats", self.seats), ("kv", self.kv)):
            if share < 1.0 and not self.fair:
                raise ValueError(f"tenants.{name}: {share:g} needs tenants.fair: true; valid: 1")
        return self


class Stage(Section):
    """Stage awareness (paper, Alg. 2): prefills of less urgent requests beside an urgent decode."""

    mode: Literal["cap", "gate", "off"] = Field(
        "cap",
        description="`cap` bounds the prefill tokens of such a step, `gate` admits none, `off` "
        "leaves steps as vLLM builds them.",
    )
    protected_level: int = Field(
        0,
        ge=0,
        description="Decodes of this level and of more urgent ones are protected.",
    )
    max_slowdown: float = Field(
        1.0,
        gt=0,
        description="`cap`: prefill time added to a step, as a share of one decode step's time "
        "by the engine profile.",
    )
    min_prefill_tokens: int = Field(
        64, ge=1, description="`cap`: prefill tokens that a step may always have."
    )
