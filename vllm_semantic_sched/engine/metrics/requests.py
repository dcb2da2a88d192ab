"""Metrics of requests, per tier."""

from __future__ import annotations

from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.lifecycle import Listener, Transition


class RequestMetrics(Listener):
    """Counts what happens to requests."""

    def __init__(self, core: SchedulingCore, counters: Counters) -> None:
        self._core = core
        self._counters = counters
        counters.start_at_zero(core.policy.tier_names)

    def moved(self, transition: Transition) -> None:
        """Count a transition."""
        job, before, state, time, reason, plan = transition[:6]
        if state is JobState.RUNNING:
            if job.started == time and before is JobState.WAITING:
                self._observe("queueing_delay_seconds", job, time)
                if job.passed is not None:
                    tier = self._core.policy.tier_names[job.level]
                    self._counters.add("seat_order_violations", (tier, job.passed.value))
        elif state.is_end:
            tier = self._core.policy.tier_names[job.level]
            self._counters.add("ended_requests", (tier, state.value))
            if state is JobState.COMPLETED:
                self._observe("e2e_latency_seconds", job, time)
                if job.outrun:
                    self._counters.add("finish_order_violations", tier)
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
