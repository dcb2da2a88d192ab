"""Metrics of requests, per tier."""

from __future__ import annotations

from vllm_semantic_sched.engine.metrics.counters import Counters
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
        job, before, state, time, reason, plan = transition[:6]
        if state is JobState.RUNNING:
            if job.started == time and before is JobState.WAITING:
                self._observe("queueing_delay_seconds", job, time)
                if job.passed is not None:
                    self._counters.add("seat_order_violations", (self._tier(job), job.passed.value))
        elif state.is_end:
            self._counters.add("ended_requests", (self._tier(job), state.value))
            if state is JobState.COMPLETED:
                self._observe("e2e_latency_seconds", job, time)
                if job.outrun:
                    self._counters.add("finish_order_violations", self._tier(job))
                expected = self._core.estimates.first_estimate(job)
                if expected is not None and reason == "stop":
                    self._counters.observe("length_error_ratio", job.generated / expected)
        elif plan:
            self._counters.add("preemptions", (plan, reason))

    def first_token(self, job: Job) -> None:
        if job.first_token is not None:
            self._observe("time_to_first_token_seconds", job, job.first_token)

    def held(self, job: Job, seconds: float) -> None:
        self._counters.add("held_seconds", self._tier(job), seconds)

    def _observe(self, name: str, job: Job, until: float) -> None:
        self._counters.observe(name, until - job.arrival, self._tier(job))

    def _tier(self, job: Job) -> str:
        return self._core.policy.tier_names[job.level]
