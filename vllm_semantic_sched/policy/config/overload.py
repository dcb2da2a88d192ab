"""Keys about overload: admission, deduplication, pressure, shedding, promises."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.config.section import Section
from vllm_semantic_sched.policy.config.tiers import TierQueue


class Bound(Section):
    """Limit on waiting requests; unset: unlimited."""

    requests: int | None = Field(None, ge=1)
    """Waiting requests."""


class Admission(Section):
    """Bounds on requests waiting for a first seat, besides those of each tier (`tiers.queue`).
    They do not apply while seats are free."""

    queue: TierQueue = TierQueue()
    """Bounds on all tiers together. When full, a more urgent new request replaces the least urgent
    one. `timeout` applies to tiers that set none."""
    tenant: Bound = Bound()
    """Bounds on each tenant (see `tenants`). Requests without a tenant share one."""
    over_share: Literal["off", "probabilistic", "hard"] = "off"
    """Under pressure, refuse new requests of a tier with more than its share of the predicted work:
    `probabilistic` with five times the excess as probability, at most 0.8, and always under
    critical pressure; `hard` always. The most urgent tier is exempt."""


class Dedup(Section):
    """A new request supersedes older ones with the same `dedup_key` in `vllm_xargs`."""

    enabled: bool = False
    """Read `dedup_key`. Keys are separate per tenant; without tenants a client can supersede the
    requests of others by guessing their keys."""
    running: Literal["leave", "end"] = "leave"
    """An older request that has started continues (`leave`) or ends (`end`)."""


class Threshold(Section):
    """Two marks on a scale where 1 means that the resource is used up."""

    warning: float = Field(gt=0)
    """Use from which the pressure is `warning`."""
    critical: float = Field(gt=0)
    """Use from which the pressure is `critical`."""

    @model_validator(mode="after")
    def _ordered(self) -> Threshold:
        if self.critical < self.warning:
            marks = f"critical: {self.critical:g} is below warning: {self.warning:g}"
            raise ValueError(f"{marks}; valid: at least as much")
        return self


class Pressure(Section):
    """When resources count as scarce."""

    kv: Threshold = Threshold(warning=0.9, critical=1.2)
    """KV blocks in use, or predicted to be needed by running requests, whichever is more."""
    seats: Threshold = Threshold(warning=1.5, critical=4.0)
    """Running and waiting requests per seat."""


class Shedding(Section):
    """Refusal of whole tiers (`tiers.shed_order`) while other tiers miss their promises."""

    enabled: bool = False
    """Shed tiers that have a `shed_order`."""
    window: float = Field(5.0, gt=0)
    """Seconds of latencies that are compared with the promises."""
    min_samples: int = Field(5, ge=1)
    """Fewest measured requests in the window from which a tier is judged."""
    recover: float = Field(2.0, gt=0)
    """Seconds that promises must be kept before the tier shed last is served again. Doubles, up to
    eightfold, each time the tier soon has to be shed again."""
    waiting: Literal["keep", "end"] = "keep"
    """Waiting requests of a shed tier stay (`keep`) or end with the code `shed` (`end`)."""


class Events(Section):
    """The event log, read by `semsched trace`."""

    path: str | None = None
    """File that gets a JSON line for each change of a request's state; unset: no log. With data
    parallelism engine N > 0 writes to NAME-N.SUFFIX."""
    max_bytes: int = Field(100_000_000, ge=1000)
    """Size at which the file is renamed to PATH.1."""
    backups: int = Field(5, ge=1)
    """Renamed files to keep; PATH.1 is the newest."""
    hash_ids: bool = False
    """Write keyed hashes in place of request ids and tenants. The key is made in PATH.key."""
