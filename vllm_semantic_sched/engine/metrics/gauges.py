"""All gauges of an engine: what it says of itself once a second."""

from __future__ import annotations

import time
from typing import Any

from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.engine.metrics.requests import RequestMetrics
from vllm_semantic_sched.policy.core import SchedulingCore


def gauges_of(scheduler: Any, requests: RequestMetrics, event_log: EventLog | None) -> Gauges:
    """The values of all gauges of a scheduler; brings its counters that are counted elsewhere up to
    date."""
    core = scheduler.core
    if scheduler.observing and core.overload is not None:
        core.overload.load.slo.advance(scheduler.clock())
    if event_log is not None:
        event_log.report(scheduler.counters)
        event_log.engine(lambda: describe(scheduler), time.monotonic())
    gauges: dict[str, Any] = {
        **requests.gauges(),
        **_overload(core),
        **scheduler.predictions.gauges(),
        **_fairness(core, scheduler.counters),
        **scheduler.preemptions.gauges(),
        "unpredicted_requests": core.waiting.buffered,
        "observing": float(scheduler.observing),
        "canary": float(scheduler.canary.running is not None),
    }
    version = scheduler.live_policy.version
    gauges |= {"policy_version": version.number, "policy_hash": version.as_number}
    scale = core.estimates.scale
    gauges["profile_scale"] = {
        "prefill": scale.prefill,
        "decode": scale.decode,
        "batch": scale.batch,
        "load": scale.load,
    }
    scheduler.counters.raise_to("hold_steps", core.protection.steps)
    scheduler.counters.raise_to("tokens_forgone", core.protection.tokens_forgone)
    if core.protection.enabled:
        gauges["hold_cost"] = core.protection.budget.share
    if core.estimates.length_ratio is not None:
        gauges["length_ratio"] = core.estimates.length_ratio
    return gauges


def describe(scheduler: Any) -> dict[str, Any]:
    """The engine, its policy and the times of its latest steps, for the event log."""
    core = scheduler.core
    capacity = core.holdings.capacity
    assert capacity is not None
    return {
        "seats": capacity.seats,
        "token_budget": int(scheduler.view.token_budget()),
        "block_size": capacity.block_size,
        "kv_blocks": capacity.blocks,
        "prefix_caching": scheduler.kv_cache_manager.enable_caching,
        "policy": core.policy.model_dump(mode="json", exclude_defaults=True, exclude={"events"}),
        "profile": core.profile.model_dump(mode="json", exclude_none=True),
        "steps": scheduler.samples.drain(),
    }


def _fairness(core: SchedulingCore, counters: Counters) -> Gauges:
    """Update the counters of aging, deadlines and tenants, and return the gauges of fair shares,
    reservations and tenants that the policy uses. O(tiers)."""
    fairness, names = core.seating, core.policy.tier_names
    counters.raise_to("promotions", fairness.promotions.count)
    counters.raise_to("overtakings", fairness.overtaking.count)
    counters.raise_to("hurried_requests", fairness.deadlines.count)
    counters.raise_to("capped_requests", fairness.top_levels.count)
    gauges: dict[str, float | dict[str, float]] = {}
    if fairness.fair_share.knobs.enabled:
        shares = fairness.fair_share.shares(core.waiting.levels)
        pairs = [shares.get(level, (0.0, 0.0)) for level in range(len(names))]
        gauges["fair_share_deviation"] = {
            name: round(share - target, 4)
            for name, (share, target) in zip(names, pairs, strict=True)
        }
    if fairness.reservation.enabled:
        gauges["reservation_free_seats"] = {
            names[level]: limit.seats - core.holdings.below(level).seats
            for level in range(len(names))
            if (limit := fairness.reservation.limit_below(level, hard=False)) is not None
        }
    if core.policy.tenants.fair:
        gauges["waiting_tenants"] = {
            names[level]: len(core.waiting.queue(level).counters) for level in range(len(names))
        }
    return dict(gauges)


def _overload(core: SchedulingCore) -> Gauges:
    """Gauges of pressure, shedding and promises. O(tiers)."""
    assert core.overload is not None
    load, account = core.overload.load, core.overload.account
    names = core.policy.tier_names
    use = load.use()
    levels = range(len(names))
    # Where nothing was measured of late, nothing was broken.
    promised = [level for level in levels if load.slo.promises(level)]
    compliance = {level: load.slo.compliance(level) for level in promised}
    headroom = {level: load.slo.headroom(level) for level in promised}
    return {
        "pressure": float(load.pressure.level),
        "resource_use": {
            name: round(getattr(use, name), 4) for name in ("kv", "seats", "queue", "step")
        },
        "shed_tiers": float(sum(map(load.is_shed, levels))),
        "queued_tokens": {
            name: round(account.level(level).tokens) for level, name in enumerate(names)
        },
        "slo_compliance": {
            names[level]: 1.0 if share is None else round(share, 4)
            for level, share in compliance.items()
        },
        "slo_headroom": {
            names[level]: 1.0 if room is None else round(room, 4)
            for level, room in headroom.items()
        },
    }
