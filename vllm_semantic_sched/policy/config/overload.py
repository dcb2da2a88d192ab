"""Keys about overload: admission, deduplication, pressure, shedding, promises."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.facts.section import Section
from vllm_semantic_sched.policy.facts.tiers import TierQueue


class Bound(Section):
    """How much may wait; what is unset is not limited."""

    requests: int | None = Field(None, ge=1, description="Waiting requests.")
    tokens: int | None = Field(
        None, ge=1, description="Waiting tokens: prompts and predicted outputs."
    )


class Admission(Section):
    """Bounds on what waits for a first seat, besides those of single tiers (`tiers.queue`).
    Requests that find a free seat are let in whatever the bounds are."""

    queue: TierQueue = Field(
        TierQueue(),
        description="All tiers together. When full, a more urgent newcomer replaces the least "
        "urgent request. `timeout` is for tiers that set none.",
    )
    tenant: Bound = Field(
        Bound(),
        description="Each tenant (see `tenants`). Requests without one share a bound.",
    )
    replace: bool = Field(
        True,
        description="Whether a more urgent newcomer replaces the least urgent one; else it is "
        "refused.",
    )
    over_share: Literal["off", "probabilistic", "hard"] = Field(
        "off",
        description="Newcomers of a tier that has more than its share of the predicted work, "
        "under pressure: `probabilistic` refuses them the more often the further it is over, and "
        "always under critical pressure; `hard` always. The most urgent tier is not concerned.",
    )
    max_retry_after: float = Field(60.0, ge=1, description="Longest Retry-After, seconds.")


class Dedup(Section):
    """Requests with the same `vllm_xargs` `dedup_key`: a newer one supersedes the older."""

    enabled: bool = Field(
        False,
        description="Obey `dedup_key`. Keys count per tenant; without tenants every client can "
        "supersede the requests of others whose keys it can guess.",
    )
    running: Literal["leave", "end"] = Field(
        "leave",
        description="What happens to an older request that has started: it goes on, or ends too.",
    )
    max_length: int = Field(
        128, ge=1, description="Longest key in characters; a request with a longer one has none."
    )


class Threshold(Section):
    """Two marks on a scale where 1 is all there is."""

    warning: float = Field(gt=0, description="From here on `warning`.")
    critical: float = Field(gt=0, description="From here on `critical`.")

    @model_validator(mode="after")
    def _ordered(self) -> Threshold:
        if self.critical < self.warning:
            raise ValueError(
                f"critical: {self.critical:g} is below warning: {self.warning:g}; valid: at least "
                "as much"
            )
        return self


class Pressure(Section):
    """When resources count as scarce; each scale is 1 when the resource is used up."""

    kv: Threshold = Field(
        Threshold(warning=0.9, critical=1.2),
        description="KV blocks: in use, or what running requests are predicted to need in the "
        "end, whichever is more.",
    )
    seats: Threshold = Field(
        Threshold(warning=1.5, critical=4.0),
        description="Seats: running and waiting requests per seat.",
    )
    queue: Threshold = Field(
        Threshold(warning=0.5, critical=0.9),
        description="Waiting requests or tokens, by what `admission` lets wait in all.",
    )
    step: Threshold = Field(
        Threshold(warning=0.8, critical=1.0),
        description="Time of a step, smoothed, by the shortest `tpot` promised to a tier.",
    )
    margin: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Pressure falls once the value is this share below the mark that raised it.",
    )
    hold: float = Field(
        2.0, ge=0, description="Seconds for which it must have been below before pressure falls."
    )


class Shedding(Section):
    """Refusing whole tiers (`tiers.shed_order`) while more important ones miss their promises."""

    enabled: bool = Field(False, description="Shed tiers that have a `shed_order`.")
    window: float = Field(5.0, gt=0, description="Seconds over which promises are judged for this.")
    min_samples: int = Field(
        5,
        ge=1,
        description="Measured requests of a tier in the window below which it is not judged.",
    )
    escalate: float = Field(
        1.0, ge=0, description="Seconds between shedding one tier and the next one."
    )
    recover: float = Field(
        2.0,
        gt=0,
        description="Seconds for which promises must be kept before the tier shed last is served "
        "again. Doubled, up to eight times, each time that this soon proves to be too early.",
    )
    waiting: Literal["keep", "end"] = Field(
        "keep",
        description="What happens to requests of a shed tier that wait already: they stay, or end "
        "with the code `shed`.",
    )


class SloWindow(Section):
    """How promises (`tiers.slo`) are watched."""

    window: float = Field(
        60.0, gt=0, description="Seconds over which compliance and headroom are taken."
    )


class Events(Section):
    """The event log, read by `semsched trace`."""

    path: str | None = Field(
        None,
        description="File to append a JSON line to for each change of a request's state; unset: "
        "none. With data parallelism engine N > 0 writes to NAME-N.SUFFIX.",
    )
    queue: int = Field(
        100_000,
        ge=1,
        description="Changes that may wait to be written; beyond that they are dropped and "
        "counted. The engine never waits for the disk.",
    )
    max_bytes: int = Field(
        100_000_000, ge=1000, description="Size at which the file is renamed to PATH.1."
    )
    backups: int = Field(5, ge=1, description="Renamed files kept: PATH.1 is the newest.")
