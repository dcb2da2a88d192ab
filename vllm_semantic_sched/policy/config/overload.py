"""Keys about overload: admission, deduplication, pressure, shedding, SLOs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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


Dedup = Literal["none", "waiting", "running"]
"""Which requests a newer one with the same `dedup_key` supersedes; see the key `dedup`."""


class Shedding(Section):
    """Refusal of whole tiers (`tiers.shed_order`) while other tiers miss their SLOs."""

    enabled: bool = False
    """Shed tiers that have a `shed_order`."""
    waiting: Literal["keep", "end"] = "keep"
    """Waiting requests of a shed tier stay (`keep`) or end with the code `shed` (`end`)."""


class Events(Section):
    """The event log, read by `semsched trace`."""

    path: str | None = None
    """File that gets a JSON line for each change of a request's state; unset: no log. At 100 MB it
    is renamed to PATH.1, and the newest five such files are kept. With data parallelism engine N >
    0 writes to NAME-N.SUFFIX."""
    hash_ids: bool = False
    """Write keyed hashes in place of request ids and tenants. The key is made in PATH.key."""
