"""What aging, deadlines, shares, tenants and reservations do, for /metrics."""

from __future__ import annotations

from vllm_semantic_sched.engine.stats import Counters, Gauges
from vllm_semantic_sched.policy.core import SchedulingCore


def report_fairness(core: SchedulingCore, counters: Counters) -> Gauges:
    """Take over the totals, and tell the gauges of what the policy uses. O(tiers)."""
    fairness, names = core.fairness, core.policy.tier_names
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
