"""Metrics of requests and of fairness, per tier."""

from __future__ import annotations

from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.lifecycle import Transition


class RequestMetrics:
    """Counts what happens to requests; a listener of the core's lifecycle
    (`policy.lifecycle.Listener`)."""

    def __init__(self, core: SchedulingCore, counters: Counters) -> None:
        self._core = core
        self._counters = counters
        counters.start_at_zero(core.policy.tier_names)

    def moved(self, transition: Transition) -> None:
        """Count a transition."""
        job, before, state, time, reason, plan = transition
        if state is JobState.RUNNING:
            if job.started == time and before is JobState.WAITING:
                self._observe("queueing_delay_seconds", job, time)
                if job.passed is not None:
                    tier = self._core.policy.tier_names[job.level]
                    self._counters.add("passed_requests", (tier, job.passed.value))
        elif state.is_end:
            tier = self._core.policy.tier_names[job.level]
            self._counters.add("ended_requests", (tier, state.value))
            if state is JobState.COMPLETED:
                self._observe("e2e_latency_seconds", job, time)
                self._compare_length(job, reason)
        elif plan:
            self._counters.add("preemptions", (plan, reason))

    def first_token(self, job: Job) -> None:
        """Record the time to a job's first token."""
        if job.first_token is not None:
            self._observe("time_to_first_token_seconds", job, job.first_token)

    def held(self, job: Job, seconds: float) -> None:
        """Add up the time in which requests were held."""
        self._counters.add("held_seconds", self._core.policy.tier_names[job.level], seconds)

    def gauges(self) -> Gauges:
        """Length and age of the queues by tier. O(tiers)."""
        lifecycle = self._core.lifecycle
        names = self._core.policy.tier_names
        return {
            "tier_info": {(name, str(level)): 1.0 for level, name in enumerate(names)},
            "waiting_requests": {n: lifecycle.waiting(level) for level, n in enumerate(names)},
            "running_requests": {
                n: self._core.holdings.level(level).seats for level, n in enumerate(names)
            },
            "longest_wait_seconds": {
                n: round(lifecycle.longest_wait(level), 3) for level, n in enumerate(names)
            },
        }

    def _observe(self, name: str, job: Job, until: float) -> None:
        tier = self._core.policy.tier_names[job.level]
        self._counters.observe(name, until - job.arrival, tier)

    def _compare_length(self, job: Job, reason: str) -> None:
        expected = self._core.estimates.first_estimate(job)
        if expected is not None and reason == "stop":
            self._counters.observe("length_error_ratio", job.generated / expected)


def report_fairness(core: SchedulingCore, counters: Counters) -> Gauges:
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


def report_overload(core: SchedulingCore) -> Gauges:
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
