"""Tiers: the urgency levels with names, SLOs and limits (S3, S4, S8)."""

from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.config.section import Section


class Slo(Section):
    """Latency objectives of a tier; unset: none."""

    ttft: float | None = Field(None, gt=0)
    """Time to first token, seconds."""
    tpot: float | None = Field(None, gt=0)
    """Time per output token, seconds."""
    e2e: float | None = Field(None, gt=0)
    """Arrival to last token, seconds."""
    percentile: float = Field(99.0, gt=0, le=100)
    """Percentage of requests that must meet the targets."""
    takes_seats: bool = False
    """A request close to its deadline (`deadlines`) may preempt one of its own or a less urgent
    tier that has had its first token."""


class Reserve(Section):
    """Capacity kept for a tier and more urgent ones."""

    seats: int = Field(0, ge=0)
    """Seats (running requests)."""
    kv: float = Field(0.0, ge=0, lt=1)
    """Share of the KV blocks."""
    mode: Literal["hard", "soft"] = "hard"
    """`hard`: less urgent tiers never use it. `soft`: they may borrow it and are preempted
    first."""


class TierQueue(Section):
    """Limits on the waiting requests of a tier; unset: unlimited."""

    requests: int | None = Field(None, ge=1)
    """Waiting requests."""
    timeout: float | None = Field(None, gt=0)
    """Seconds after which a request without a first seat is refused."""


class Tier(Section):
    """One urgency level."""

    name: str = Field(min_length=1, max_length=40)
    """Used in metrics and messages."""
    slo: Slo = Slo()
    service_tier: Literal["default", "priority", "flex"] | None = None
    """Requests with this `service_tier` of the OpenAI API get this level; a value that no tier has
    is ignored. `auto` counts as `default`."""
    share: float | None = Field(None, gt=0, le=1)
    """Target share of the engine's time. Tiers without one divide the rest evenly."""
    pace: float | None = Field(None, gt=0)
    """Tokens per second at which an answer is read. An answer that is two seconds ahead of that is
    not protected further, and is the first to be held. Unset: as fast as possible."""
    reserve: Reserve = Reserve()
    queue: TierQueue = TierQueue()
    shed_order: int | None = Field(None, ge=1)
    """Order in which tiers are shed under overload, 1 first; unset: never. Not allowed for the most
    urgent tier."""
    preemptible: bool = True
    """Requests may lose their seats to more urgent ones. Off: they still lose them when they grow
    into a hard reservation or the KV cache is full."""
    drop: bool = False
    """Requests may be ended with the code `dropped` if their preemptions would cost more than a
    retry by the client, or by `preemption.after_limit`."""
