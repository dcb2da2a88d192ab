"""SemanticScheduler: vLLM's V1 scheduler with the policy core's order and preemption.

It never copies `schedule()`; it arranges vLLM's own queues before each step and looks at what
came out afterwards. All state about requests lives in `policy.core`.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_semantic_sched.engine import commands
from vllm_semantic_sched.engine.capacity import Capacity
from vllm_semantic_sched.engine.clock import ServiceClock
from vllm_semantic_sched.engine.ending import Endings
from vllm_semantic_sched.engine.event_log import EventLog
from vllm_semantic_sched.engine.fairness_metrics import report_fairness
from vllm_semantic_sched.engine.guard import Guard, GuardedListener
from vllm_semantic_sched.engine.live_policy import LivePolicy, reload_on_hangup
from vllm_semantic_sched.engine.outcome import end_of
from vllm_semantic_sched.engine.overload import Overload
from vllm_semantic_sched.engine.prediction import PredictionFeed
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.request_metrics import RequestMetrics
from vllm_semantic_sched.engine.request_queue import SemanticRequestQueue
from vllm_semantic_sched.engine.settings import load_settings
from vllm_semantic_sched.engine.stats import Counters, Gauges
from vllm_semantic_sched.engine.step_clock import StepClock, batch_of
from vllm_semantic_sched.engine.step_limit import StepLimit
from vllm_semantic_sched.engine.version import check_vllm_version
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.eviction.retention import PreemptionKind, PreemptionPlan
from vllm_semantic_sched.policy.eviction.victims import Room
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.order.tenants import read_tenant
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

# Under vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.semantic_sched")

_DROPPED = Refusal(
    Code.DROPPED,
    "The request was ended to make room for more urgent ones: preempting it once more would have "
    "cost more than starting over.",
)


class SemanticScheduler(Scheduler):
    """Serves the most urgent requests first, and the shortest first among equals.

    Given to vLLM by `--scheduler-cls vllm_semantic_sched.SemanticScheduler`. When vLLM schedules
    asynchronously the instance is an `AsyncSemanticScheduler`. Under the base policy `fcfs` it
    is vLLM's scheduler, untouched.

    Raises:
        PolicyError: at construction, if policy or profile cannot be used.
        UnsupportedVersion: at construction, if vLLM is outside the supported range.
    """

    # None: vLLM's scheduler, untouched; so it is before construction, too.
    _core: SchedulingCore | None = None

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> SemanticScheduler:
        if cls is SemanticScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncSemanticScheduler
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_vllm_version()
        policy, profile = load_settings(vllm_config.additional_config)
        super().__init__(vllm_config, *args, **kwargs)
        self._counters = Counters()
        self._live_policy: LivePolicy | None = None
        self._clock = ServiceClock()
        commands.install()
        if policy.base == "fcfs":
            logger.info("Semantic scheduling: base policy fcfs, vLLM's own scheduler.")
            return
        self._jobs: dict[str, Job] = {}
        self._guard = Guard(self._counters, logger)
        self._core = core = SchedulingCore(policy, profile, clock=self._clock)
        self._request_metrics = RequestMetrics(core, self._counters)
        self._event_log = self._open_event_log(core)
        for listener in (self._request_metrics, self._event_log):
            if listener is not None:
                core.lifecycle.listeners.append(GuardedListener(listener, self._guard))
        self._preempting_for = "kv_shortage"  # what vLLM itself preempts for
        # Under this policy vLLM takes its victims from the tail of self.running, which is kept
        # sorted here, so that the tail is the least urgent request.
        self.policy = SchedulingPolicy.FCFS
        self.waiting = SemanticRequestQueue(core, self._jobs, core.waiting, self._guard)
        self.kv_holding_waiting = SemanticRequestQueue(
            core, self._jobs, core.new_queue(), self._guard
        )
        self._endings = Endings(self)
        self._capacity = Capacity(self)
        core.set_capacity(self._capacity.total(), 1 + self.num_spec_tokens)
        self._overload = Overload(self, core, self._capacity, self._counters, self._clock, logger)
        core.lifecycle.listeners.append(GuardedListener(self._overload.control, self._guard))
        self._step_clock = StepClock()
        self._preemptions = Preemptions(self, core, self._counters, logger)
        self._step_limit = StepLimit(self, self._capacity, self._jobs, self._observe)
        self._predictions = PredictionFeed(
            core, self._jobs, self.structured_output_manager, self._counters, logger
        )
        self._live_policy = LivePolicy(
            core, lambda: load_settings(vllm_config.additional_config), self._counters, logger
        )
        if reload_on_hangup(self._live_policy.request_load):
            self._live_policy.start()
        logger.info("Semantic scheduling: base policy %s, profile %s.", policy.base, profile.source)
        for doubt in profile.doubts(self.max_model_len):
            logger.warning("Semantic scheduling: %s.", doubt)

    # vLLM's interface

    def add_request(self, request: Request) -> None:
        if self._core is not None and request.request_id not in self._jobs:
            self._adopt_policy()
            with self._guard("reading a new request"):
                self._jobs[request.request_id] = self._new_job(self._core, request)
            super().add_request(request)
            if (job := self._jobs.get(request.request_id)) is not None:
                with self._guard("admitting a request"):
                    self._overload.arrived(request, job)
            return
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        core = self._core
        if core is None:
            return super().schedule(*args, **kwargs)
        begin = time.perf_counter()
        self._adopt_policy()
        with self._guard("applying predictions"):
            self._revise(core, self._predictions.apply())
        with self._guard("revising estimates"):
            self._revise(core, core.step(self._observe, self._clock()))
        with self._guard("ending what waited too long"):
            self._overload.step()
        with self._guard("keeping reservations"):
            self._keep_reservations(core)
        with self._guard("making room for urgent requests"):
            self._make_room(core)
        with self._guard("limiting prefills"):
            self._step_limit.set(core)
        self._endings.hold()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._step_limit.restore()
            with self._guard("taking in admitted requests"):
                self._take_in_admitted(core)
            with self._guard("ending requests"):
                self._endings.release()
            self._counters.observe("schedule_seconds", time.perf_counter() - begin)
        with self._guard("timing steps"):
            batch = batch_of(
                output, self.requests, self.num_spec_tokens, self._capacity.tokens_held()
            )
            self._step_clock.scheduled(output, batch, time.monotonic())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        if self._core is not None:
            with self._guard("timing steps"):
                step = self._step_clock.finished(scheduler_output, time.monotonic())
                if step is not None:
                    self._core.observe_step(*step)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if self._core is not None:
            with self._guard("noting first tokens"):
                self._note_first_tokens(self._core)
            with self._guard("timing resumptions"):
                self._preemptions.watch()
            with self._guard("telling clients of refused requests"):
                self._endings.deliver(outputs)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        if self._core is None:
            return super().reset_prefix_cache(*args, **kwargs)
        before, self._preempting_for = self._preempting_for, "reset"
        with self._guard("dropping host copies"):
            self._preemptions.lose_copies(self._jobs)
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._preempting_for = before

    def refuse(self, request_id: str, refusal: Refusal) -> bool:
        """End a waiting or running request with a code that its client gets to see. May be called
        at any time on the engine's thread.

        Returns:
            False if there is no such request or its kind cannot be refused (pooling, streamed
            input).
        """
        job = self._jobs.get(request_id)
        if not self._endings.end(request_id, refusal):
            return False
        if job is not None and self._core is not None:
            tier = self._core.policy.tier_names[job.level]
            self._counters.add("refused", (refusal.code.value, tier))
        return True

    def can_refuse(self, request: Request) -> bool:
        """Whether `refuse` can end a request of this kind."""
        return self._endings.can_end(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._core is not None:
            with self._guard("reporting statistics"):
                core, idle = self._core, not self.requests
                self._counters.attach(stats, lambda: self._gauges(core), time.monotonic(), idle)
        return stats

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:
            self._clock.resume()
        else:
            self._clock.pause()

    def shutdown(self) -> None:
        if self._core is not None:
            with self._guard("stopping the predictor"):
                self._predictions.close()
            if self._live_policy is not None:
                self._live_policy.close()
            if self._event_log is not None:
                with self._guard("closing the event log"):
                    self._event_log.close()
        super().shutdown()

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False, **kwargs: Any
    ) -> None:
        plan: PreemptionPlan | None = None
        if self._core is not None:
            with self._guard("preempting a request"):
                # Stale output is dropped when the cache is reset: KV is not to be kept then.
                plan = self._preemptions.preempt(
                    self._jobs[request.request_id],
                    request,
                    keep=not drop_stale_output,
                    reason=self._preempting_for,
                )
        super()._preempt_request(request, timestamp, drop_stale_output, **kwargs)
        if plan is not None and plan.kind is PreemptionKind.DROP:
            with self._guard("dropping a request"):
                self.refuse(request.request_id, _DROPPED)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._core is not None:
            with self._guard("finishing a request"):
                job = self._jobs.pop(request.request_id, None)
                self._preemptions.finished(request)
                if job is not None:
                    self._predictions.cancel(job)
                    job.generated = request.num_output_tokens
                    if job.generated:
                        self._core.lifecycle.first_token(job)
                    end = end_of(request, self._endings.refusal, self._predictions.decode)
                    self._core.finish(job, end.ending, end.state, end.reason)
        return super()._free_request(request, *args, **kwargs)

    # Ours

    def _adopt_policy(self) -> None:
        """Put a policy that was reloaded in force, between steps."""
        if self._live_policy is not None and self._live_policy.has_news:
            with self._guard("adopting a policy"):
                self._live_policy.adopt()

    def _new_job(self, core: SchedulingCore, request: Request) -> Job:
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        hint = core.read_hints(extra_args, request.priority)
        if hint.problem is not None:
            if not self._counters.total("invalid_hints"):
                logger.warning(
                    "Request %s: %s; served at its predicted level. Further invalid hints are "
                    "counted in semsched:invalid_hints_total only.",
                    request.request_id,
                    hint.problem,
                )
            self._counters.add("invalid_hints")
        job = core.new_job(
            request.request_id,
            arrival=self._clock(),
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=hint,
            awaits_prediction=self._predictions.submit(request, hint),
            tenant=read_tenant(extra_args),
        )
        self._counters.add("requests", hint.source.value)
        return job

    def _observe(self, job: Job) -> None:
        request = self.requests[job.request_id]
        job.computed = request.num_computed_tokens
        job.generated = request.num_output_tokens

    def _make_room(self, core: SchedulingCore) -> None:
        """Preempt running requests for waiting ones, which vLLM itself never does (P5)."""
        if not core.eviction.wants_room or self.pause_state is not PauseState.UNPAUSED:
            return
        room = Room(
            seats=self._capacity.free_seats(),
            blocks=self._capacity.free_for_admission(),
            prefill_tokens=self.max_num_scheduled_tokens - len(self.running),
        )
        requests, capacity = self.requests, self._capacity
        for victim in choose_evictions(
            core,
            room,
            ready=lambda job: capacity.is_ready(requests[job.request_id]),
            needed_blocks=lambda job: capacity.needed(requests[job.request_id]),
            freeable_blocks=self._freed_at_once,
            preemption_seconds=lambda job: (
                self._preemptions.plan(job, requests[job.request_id]).seconds
            ),
        ):
            self._evict(requests[victim.request_id], "urgent")

    def _keep_reservations(self, core: SchedulingCore) -> None:
        """Preempt what has grown into a hard reservation, or beyond its tenant's part."""
        while (found := core.eviction.intruder()) is not None:
            job, reason = found
            if self._freed_at_once(job) is None:
                break
            self._evict(self.requests[job.request_id], reason)

    def _freed_at_once(self, job: Job) -> int | None:
        request = self.requests[job.request_id]
        # Blocks that a step in flight may still write do not come free at once.
        if not self._request_blocks_can_be_freed(request):
            return None
        return self._capacity.freed_by(request)

    def _evict(self, request: Request, reason: str) -> None:
        self.running.remove(request)
        self._preempting_for = reason
        try:
            self._preempt_request(
                request, time.monotonic(), drop_stale_output=self.requires_kv_delivery
            )
        finally:
            self._preempting_for = "kv_shortage"
        # Else a resumption in this very step would be taken for a continued run.
        self.prev_step_scheduled_req_ids.discard(request.request_id)
        if reason == "urgent":
            self._counters.add("admission_preemptions")

    def _take_in_admitted(self, core: SchedulingCore) -> None:
        """vLLM appends what it admits to self.running; move those to their place."""
        admitted: list[Request] = []
        while self.running:
            job = self._jobs.get(self.running[-1].request_id)
            if job is None or job.state is JobState.RUNNING:
                break
            admitted.append(self.running.pop())
        for request in reversed(admitted):
            with self._guard("starting a request"):
                job = self._jobs[request.request_id]
                self._observe(job)
                core.start(job)
                self._preemptions.resumed(request)
            self._insert(core, request)

    def _revise(self, core: SchedulingCore, jobs: list[Job]) -> None:
        self._reposition(core, jobs)
        self._overload.revised(jobs)

    def _reposition(self, core: SchedulingCore, jobs: Iterable[Job]) -> None:
        """Estimates or levels changed; where such a job runs, so does its place in self.running."""
        moved = [self.requests[job.request_id] for job in jobs if job.state is JobState.RUNNING]
        # All out before the first goes in again: a place is found among those that are in order.
        for request in dict.fromkeys(moved):
            self.running.remove(request)
        for request in dict.fromkeys(moved):
            self._insert(core, request)

    def _insert(self, core: SchedulingCore, request: Request) -> None:
        place = len(self.running)  # whatever fails, the request must not get lost
        with self._guard("ordering running requests"):
            place = bisect.bisect(
                self.running,
                core.running.order(self._jobs[request.request_id]),
                key=lambda other: core.running.order(self._jobs[other.request_id]),
            )
        self.running.insert(place, request)

    def _open_event_log(self, core: SchedulingCore) -> EventLog | None:
        settings = core.policy.events
        if settings.path is None:
            return None
        engine = self.vllm_config.parallel_config.data_parallel_index
        return EventLog(settings, engine, lambda: core.policy.tier_names, logger)

    def _note_first_tokens(self, core: SchedulingCore) -> None:
        """O(requests that were admitted and have no token yet)."""
        for job in list(core.lifecycle.starting):
            request = self.requests.get(job.request_id)
            if request is None:  # an error in between: its end was not noted
                del core.lifecycle.starting[job]
            elif request.num_output_tokens:
                core.first_token(job)

    def _gauges(self, core: SchedulingCore) -> Gauges:
        if self._event_log is not None:
            self._event_log.report(self._counters)
        gauges = {
            **self._request_metrics.gauges(),
            **self._overload.gauges(),
            **self._predictions.gauges(),
            **report_fairness(core, self._counters),
            **self._preemptions.gauges(),
            "unpredicted_requests": core.waiting.buffered,
        }
        if self._live_policy is not None:
            version = self._live_policy.version
            gauges |= {"policy_version": version.number, "policy_hash": version.as_number}
        scale = core.profile_scale
        gauges["profile_scale"] = {
            "prefill": scale.prefill,
            "decode": scale.decode,
            "load": scale.load,
        }
        if core.length_ratio is not None:
            gauges["length_ratio"] = core.length_ratio
        return gauges


class AsyncSemanticScheduler(SemanticScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""
