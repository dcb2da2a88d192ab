"""Tiers: the urgency levels with names, promises and limits (S3, S4, S8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.facts.section import Section


class Slo(Section):
    """Latency promised to a tier; what is unset is not promised."""

    ttft: float | None = Field(None, gt=0, description="Time to first token, seconds.")
    tpot: float | None = Field(None, gt=0, description="Time per output token, seconds.")
    e2e: float | None = Field(None, gt=0, description="Arrival to last token, seconds.")
    percentile: float = Field(
        99.0, gt=0, le=100, description="Percentage of requests that must meet the targets."
    )
    takes_seats: bool = Field(
        False,
        description="A request whose first token is about to be late (`deadlines`) may take the "
        "seat of one of its own tier, or less urgent, that has had its first token.",
    )


class Reserve(Section):
    """Capacity kept for a tier and more urgent ones."""

    seats: int = Field(0, ge=0, description="Seats (running requests).")
    kv: float = Field(0.0, ge=0, lt=1, description="Share of the KV blocks.")
    mode: Literal["hard", "soft"] = Field(
        "hard",
        description="`hard`: less urgent tiers never get it. `soft`: they may borrow it and lose "
        "it first.",
    )


class TierQueue(Section):
    """How much of a tier may wait, and how long; what is unset is not limited."""

    requests: int | None = Field(None, ge=1, description="Waiting requests.")
    tokens: int | None = Field(
        None, ge=1, description="Waiting tokens: prompts and predicted outputs."
    )
    timeout: float | None = Field(
        None, gt=0, description="Seconds without a first seat after which a request is refused."
    )


class Tier(Section):
    """One urgency level."""

    name: str = Field(min_length=1, max_length=40, description="Used in metrics and messages.")
    slo: Slo = Slo()
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Target share of the engine's time. Tiers without one divide what is left.",
    )
    reserve: Reserve = Reserve()
    queue: TierQueue = TierQueue()
    shed_order: int | None = Field(
        None,
        ge=1,
        description="Under overload tiers are shed in this order, 1 first; unset: never. The most "
        "urgent tier cannot have one.",
    )
    preemptible: bool = Field(
        True,
        description="May lose its seat to more urgent requests. What has grown into a hard "
        "reservation, or is in the way of a full KV cache, loses it all the same.",
    )
    drop: bool = Field(
        False,
        description="May be ended, with an error that says so, where preempting it again would "
        "cost more than starting over.",
    )


def target_shares(tiers: Sequence[Tier]) -> list[float]:
    """Target share of each tier; tiers without one divide what the others leave evenly."""
    left = max(0.0, 1.0 - sum(tier.share or 0.0 for tier in tiers))
    without = sum(tier.share is None for tier in tiers)
    return [left / without if tier.share is None else tier.share for tier in tiers]
