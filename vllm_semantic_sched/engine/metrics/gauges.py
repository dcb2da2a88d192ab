"""What an engine reports of its requests, and all its gauges."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.clock import StepSamples, monotonic
from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.policy.canary import Canary
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.live import PolicyVersion
from vllm_semantic_sched.policy.order.inversions import InversionCause, Inversions
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition


class RequestMetrics(Listener):
    """Counts and times requests as they change state."""

    def __init__(self, core: SchedulingCore, counters: Counters) -> None:
        self._core = core
        self._counters = counters
        counters.start_at_zero(core.policy.tier_names)

    def moved(self, transition: Transition) -> None:
        """Count ends and preemptions, and time first seats and answers."""
        job = transition.job
        state = transition.state
        if state is JobState.RUNNING:
            is_first = job.started == transition.time and transition.before is JobState.WAITING
            if is_first:
                self._observe("queueing_delay_seconds", job, transition.time)
        elif state.is_end:
            self._counters.add("ended_requests", (self._tier(job), state.value))
            if state is JobState.COMPLETED:
                self._completed(transition)
        elif transition.plan:
            self._counters.add("preemptions", (transition.plan, transition.reason))

    def _completed(self, transition: Transition) -> None:
        job = transition.job
        self._observe("e2e_latency_seconds", job, transition.time)
        expected = self._core.estimates.first_estimate(job)
        if expected is not None and transition.reason == "stop":
            self._counters.observe("length_error_ratio", job.generated / expected)

    def watch_order(self) -> None:
        """Count inversions of the order by urgency."""

        def seat_inverted(job: Job, cause: InversionCause) -> None:
            self._counters.add("seat_order_violations", (self._tier(job), cause.value))

        def finish_inverted(job: Job) -> None:
            self._counters.add("finish_order_violations", self._tier(job))

        levels = self._core.policy.levels
        self._core.watch_order(Inversions(levels, seat_inverted, finish_inverted))

    def first_token(self, job: Job) -> None:
        """Time a request's first token, from its arrival."""
        if job.first_token is not None:
            self._observe("time_to_first_token_seconds", job, job.first_token)

    def held(self, job: Job, seconds: float) -> None:
        """Add a hold that is over to the time that requests of its tier were held."""
        self._counters.add("held_seconds", self._tier(job), seconds)

    def _observe(self, name: str, job: Job, until: float) -> None:
        self._counters.observe(name, until - job.arrival, self._tier(job))

    def _tier(self, job: Job) -> str:
        return self._core.policy.tier_names[job.level]


class HasGauges(Protocol):
    """A part of the scheduler with gauges of its own."""

    def gauges(self) -> Mapping[str, float]:
        """Values by name of the gauge."""


class HasVersion(Protocol):
    """See `LivePolicy`."""

    version: PolicyVersion


class HasCanary(Protocol):
    """See `CanaryDriver`."""

    running: Canary | None


class MeasuredScheduler(Protocol):
    """The attributes of a `SemanticScheduler` from which its metrics are taken."""

    core: SchedulingCore
    counters: Counters
    observing: bool
    samples: StepSamples
    kv_cache_manager: vllm_api.KVCacheManager
    max_num_scheduled_tokens: int
    scheduler_config: vllm_api.SchedulerConfig

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds on the policy's clock."""

    @property
    def live_policy(self) -> HasVersion:
        """The policy in force."""

    @property
    def canary(self) -> HasCanary:
        """The canary of this engine."""

    @property
    def predictions(self) -> HasGauges:
        """The predictor."""

    @property
    def preemptions(self) -> HasGauges:
        """Preemption and the host pool."""


def gauges_of(
    scheduler: MeasuredScheduler, event_log: EventLog | None, describes: bool = True
) -> Gauges:
    """The values of all gauges; brings counters that are counted elsewhere up to date, and, with
    `describes`, lets the event log describe the engine."""
    core = scheduler.core
    counters = scheduler.counters
    if scheduler.observing and core.overload is not None:
        core.overload.load.slo.advance(scheduler.clock())
    if event_log is not None:
        event_log.report(counters)
        if describes:
            event_log.engine(lambda: describe(scheduler), monotonic())
    version = scheduler.live_policy.version
    scale = core.estimates.scale
    gauges: dict[str, Any] = {
        **_queues(core),
        **_overload(core),
        **scheduler.predictions.gauges(),
        **_seating(core, counters),
        **scheduler.preemptions.gauges(),
        "unpredicted_requests": core.waiting.buffered,
        "observing": float(scheduler.observing),
        "canary": float(scheduler.canary.running is not None),
        "policy_version": version.number,
        "policy_hash": float(int(version.fingerprint, 16)),  # 48 bits: exact
        "profile_scale": {
            name: getattr(scale, name) for name in ("prefill", "decode", "batch", "load")
        },
    }
    counters.raise_to("hold_steps", core.protection.steps)
    counters.raise_to("forgone_tokens", core.protection.tokens_forgone)
    if core.protection.enabled:
        gauges["hold_cost"] = core.protection.budget.share
    if core.estimates.length_ratio is not None:
        gauges["length_ratio"] = core.estimates.length_ratio
    return gauges


def describe(scheduler: MeasuredScheduler) -> dict[str, Any]:
    """The engine, its policy and the times of its latest steps, for the event log."""
    core = scheduler.core
    capacity = core.allocations.capacity
    assert capacity is not None
    return {
        "seats": capacity.seats,
        "asynchronous": bool(scheduler.scheduler_config.async_scheduling),
        "token_budget": scheduler.max_num_scheduled_tokens,
        "block_size": capacity.block_size,
        "kv_blocks": capacity.blocks,
        "prefix_caching": scheduler.kv_cache_manager.enable_caching,
        "policy": core.policy.model_dump(mode="json", exclude_defaults=True, exclude={"events"}),
        "profile": core.profile.model_dump(mode="json", exclude_none=True),
        "steps": scheduler.samples.drain(),
    }


def _by_tier(core: SchedulingCore, value: Callable[[int], float]) -> dict[str, float]:
    return {name: value(level) for level, name in enumerate(core.policy.tier_names)}


def _queues(core: SchedulingCore) -> Gauges:
    """Length and age of the queues. O(tiers)."""
    names = core.policy.tier_names
    lifecycle = core.lifecycle
    return {
        "tier_info": {(name, str(level)): 1.0 for level, name in enumerate(names)},
        "waiting_requests": _by_tier(core, lifecycle.waiting),
        "running_requests": _by_tier(core, lambda level: core.allocations.levels[level].seats),
        "longest_wait_seconds": _by_tier(
            core, lambda level: round(lifecycle.longest_wait(level), 3)
        ),
    }


def _seating(core: SchedulingCore, counters: Counters) -> Gauges:
    """Update the counters of aging, deadlines and tenants, and return the gauges of fair shares,
    reservations and tenants that the policy uses. O(tiers)."""
    seating = core.seating
    counters.raise_to("promotions", seating.credits.promotions)
    counters.raise_to("overtakings", seating.overtaking.count)
    counters.raise_to("deadline_boosted_requests", seating.credits.deadline_boosted)
    counters.raise_to("capped_requests", seating.top_levels.count)
    gauges: dict[str, float | dict[str, float]] = {}
    if core.policy.fair_share.enabled:
        shares = seating.fair_share.shares(core.waiting.levels)

        def deviation(level: int) -> float:
            actual, due = shares.get(level, (0.0, 0.0))
            return round(actual - due, 4)

        gauges["fair_share_deviation"] = _by_tier(core, deviation)
    if seating.limits.table.reserves:
        free_seats = {}
        limits = zip(seating.limits.table.soft, core.allocations.below, strict=True)
        for name, (limit, less_urgent) in zip(core.policy.tier_names, limits, strict=True):
            if limit.seats < math.inf:
                free_seats[name] = limit.seats - less_urgent.seats
        gauges["reservation_free_seats"] = free_seats
    if core.policy.sessions.memory is not None:
        gauges["session_floors"] = float(core.sessions.floors(core.lifecycle.clock()))
    if core.policy.tenants.fair:
        gauges["waiting_tenants"] = _by_tier(
            core, lambda level: len(core.waiting.queues[level].counters)
        )
    return gauges


def _overload(core: SchedulingCore) -> Gauges:
    """Gauges of pressure, shedding and SLOs. O(tiers)."""
    assert core.overload is not None
    load = core.overload.load
    names = core.policy.tier_names
    use = load.use()

    def with_slo(share_of: Callable[[int], float | None]) -> dict[str, float]:
        """Where nothing was measured of late, no SLO was missed."""
        shares = {}
        for level, name in enumerate(names):
            if load.slo.targets[level]:
                share = share_of(level)
                shares[name] = 1.0 if share is None else round(share, 4)
        return shares

    return {
        "pressure": float(load.pressure.level),
        "resource_use": {
            name: round(getattr(use, name), 4) for name in ("kv", "seats", "queue", "step")
        },
        "shed_tiers": float(sum(map(load.is_shed, range(len(names))))),
        "queued_tokens": _by_tier(
            core, lambda level: round(core.allocations.levels[level].queued_tokens)
        ),
        "slo_compliance": with_slo(load.slo.compliance),
        "slo_headroom": with_slo(load.slo.headroom),
    }
