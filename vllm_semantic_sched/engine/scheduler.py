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

from vllm_semantic_sched.engine.capacity import Capacity
from vllm_semantic_sched.engine.clock import ServiceClock, StepClock, batch_of
from vllm_semantic_sched.engine.ending import Endings, end_of
from vllm_semantic_sched.engine.event_log import EventLog
from vllm_semantic_sched.engine.guard import Guard, GuardedListener
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.kv.preemption import Preemptions
from vllm_semantic_sched.engine.live_policy import LivePolicy, reload_on_hangup
from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.metrics.requests import RequestMetrics, report_fairness
from vllm_semantic_sched.engine.overload import Overload
from vllm_semantic_sched.engine.prediction import PredictionFeed
from vllm_semantic_sched.engine.request_queue import SemanticRequestQueue
from vllm_semantic_sched.engine.settings import load_settings
from vllm_semantic_sched.engine.step_limit import StepLimit
from vllm_semantic_sched.engine.vllm_api import (
    AsyncScheduler,
    EngineCoreOutputs,
    HookedScheduler,
    PauseState,
    Request,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
    attach_message,
    blocks_can_be_freed,
    blocks_freed_by,
    check_vllm_version,
    is_ready,
    preempt,
    replace_queues,
)
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.profile import EngineProfile
from vllm_semantic_sched.policy.eviction.retention import PreemptionKind, PreemptionPlan
from vllm_semantic_sched.policy.eviction.room import Room, choose_evictions
from vllm_semantic_sched.policy.job import Job, JobState
from vllm_semantic_sched.policy.order.tenants import read_tenant
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

# Under vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.semantic_sched")

_DROPPED = Refusal(
    Code.DROPPED,
    "The request was ended to make room for more urgent ones: preempting it once more would have "
    "cost more than starting over.",
)


class SemanticScheduler(HookedScheduler):
    """Serves the most urgent requests first, and the shortest first among equals.

    Given to vLLM by `--scheduler-cls vllm_semantic_sched.SemanticScheduler`. Under the base policy
    `fcfs` the instance is vLLM's own scheduler; where vLLM schedules asynchronously it is an
    `AsyncSemanticScheduler`.

    Raises:
        PolicyError: at construction, if policy or profile cannot be used.
        UnsupportedVersion: at construction, if vLLM is outside the supported range.

    Attributes:
        core: the policy's decisions and its state.
        jobs: the policy's view of each request, by request id.
        counters: what `/metrics` reports.
        clock: seconds during which the engine was serving.
    """

    _settings: tuple[Policy, EngineProfile]  # set by __new__ for __init__

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        check_vllm_version()
        commands.install()
        settings = load_settings(vllm_config.additional_config)
        asynchronous = vllm_config.scheduler_config.async_scheduling
        if settings[0].base == "fcfs":
            logger.info("Semantic scheduling: base policy fcfs, vLLM's own scheduler.")
            stock = AsyncScheduler if asynchronous or issubclass(cls, AsyncScheduler) else Scheduler
            return stock(vllm_config, *args, **kwargs)
        if cls is SemanticScheduler and asynchronous:
            cls = AsyncSemanticScheduler
        self = super().__new__(cls)
        self._settings = settings
        return self

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        policy, profile = self._settings
        super().__init__(vllm_config, *args, **kwargs)
        self.counters = Counters()
        self.clock = ServiceClock()
        self.jobs: dict[str, Job] = {}
        self._guard = Guard(self.counters, logger)
        self.core = core = SchedulingCore(policy, profile, clock=self.clock)
        self._request_metrics = RequestMetrics(core, self.counters)
        self._event_log = self._open_event_log(core)
        for listener in (self._request_metrics, self._event_log):
            if listener is not None:
                core.lifecycle.listeners.append(GuardedListener(listener, self._guard))
        self._preempting_for = "kv_shortage"  # what vLLM itself preempts for
        # self.running is kept sorted, so the tail, where vLLM takes its victims, is the least
        # urgent request.
        replace_queues(
            self,
            SemanticRequestQueue(core, self.jobs, core.waiting, self._guard),
            SemanticRequestQueue(core, self.jobs, core.new_queue(), self._guard),
        )
        self._endings = Endings(self)
        self.capacity = Capacity(self)
        core.set_capacity(self.capacity.total(), 1 + self.num_spec_tokens)
        self.overload = Overload(self, core, self.capacity, self.counters, self.clock, logger)
        core.lifecycle.listeners.append(GuardedListener(self.overload.control, self._guard))
        self.step_clock = StepClock()
        self.preemptions = Preemptions(self, core, self.counters, logger)
        self._step_limit = StepLimit(self, self.capacity, self.jobs, self._observe)
        self.predictions = PredictionFeed(
            core, self.jobs, self.structured_output_manager, self.counters, logger
        )
        self.live_policy = LivePolicy(
            core, lambda: load_settings(vllm_config.additional_config), self.counters, logger
        )
        if reload_on_hangup(self.live_policy.request_load):
            self.live_policy.start()
        logger.info("Semantic scheduling: base policy %s, profile %s.", policy.base, profile.source)
        for doubt in profile.doubts(self.max_model_len):
            logger.warning("Semantic scheduling: %s.", doubt)

    # vLLM's interface

    def add_request(self, request: Request) -> None:
        if request.request_id in self.jobs:
            super().add_request(request)
            return
        self._adopt_policy()
        with self._guard("reading a new request"):
            self.jobs[request.request_id] = self._new_job(self.core, request)
        super().add_request(request)
        if (job := self.jobs.get(request.request_id)) is not None:
            with self._guard("admitting a request"):
                self.overload.arrived(request, job)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        core = self.core
        begin = time.perf_counter()
        self._adopt_policy()
        with self._guard("applying predictions"):
            self._revise(core, self.predictions.apply())
        with self._guard("revising estimates"):
            self._revise(core, core.step(self._observe, self.clock()))
        with self._guard("ending what waited too long"):
            self.overload.step()
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
            self.counters.observe("schedule_seconds", time.perf_counter() - begin)
        with self._guard("timing steps"):
            batch = batch_of(
                output, self.requests, self.num_spec_tokens, self.capacity.tokens_held()
            )
            self.step_clock.scheduled(output, batch, time.monotonic())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        with self._guard("timing steps"):
            step = self.step_clock.finished(scheduler_output, time.monotonic())
            if step is not None:
                self.core.observe_step(*step)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        with self._guard("noting first tokens"):
            self._note_first_tokens(self.core)
        with self._guard("timing resumptions"):
            self.preemptions.watch()
        with self._guard("telling clients of refused requests"):
            self._endings.deliver(outputs)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        before, self._preempting_for = self._preempting_for, "reset"
        with self._guard("dropping host copies"):
            self.preemptions.lose_copies(self.jobs)
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
        job = self.jobs.get(request_id)
        if not self._endings.end(request_id, refusal):
            return False
        if job is not None:
            tier = self.core.policy.tier_names[job.level]
            self.counters.add("refused", (refusal.code.value, tier))
        return True

    def can_refuse(self, request: Request) -> bool:
        """Whether `refuse` can end a request of this kind."""
        return self._endings.can_end(request)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            with self._guard("reporting statistics"):
                now, idle = time.monotonic(), not self.requests
                message = self.counters.take_message(self.gauges, now, idle)
                if message is not None:
                    attach_message(stats, message)
        return stats

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        if pause_state is PauseState.UNPAUSED:
            self.clock.resume()
        else:
            self.clock.pause()

    def shutdown(self) -> None:
        with self._guard("stopping the predictor"):
            self.predictions.close()
        self.live_policy.close()
        if self._event_log is not None:
            with self._guard("closing the event log"):
                self._event_log.close()
        super().shutdown()

    # Hooks around vLLM's private methods

    def before_preemption(self, request: Request, keep_kv: bool) -> PreemptionPlan | None:
        with self._guard("preempting a request"):
            job = self.jobs[request.request_id]
            return self.preemptions.preempt(job, request, keep_kv, self._preempting_for)
        return None

    def after_preemption(self, request: Request, value: PreemptionPlan | None) -> None:
        if value is not None and value.kind is PreemptionKind.DROP:
            with self._guard("dropping a request"):
                self.refuse(request.request_id, _DROPPED)

    def before_free(self, request: Request) -> None:
        with self._guard("finishing a request"):
            job = self.jobs.pop(request.request_id, None)
            self.preemptions.finished(request)
            if job is not None:
                self.predictions.cancel(job)
                job.generated = request.num_output_tokens
                if job.generated:
                    self.core.lifecycle.first_token(job)
                end = end_of(request, self._endings.refusal, self.predictions.decode)
                self.core.finish(job, end.ending, end.state, end.reason)

    # Ours

    def _adopt_policy(self) -> None:
        """Put a policy that was reloaded in force, between steps."""
        if self.live_policy.has_news:
            with self._guard("adopting a policy"):
                self.live_policy.adopt()

    def _new_job(self, core: SchedulingCore, request: Request) -> Job:
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        hint = core.read_hints(extra_args, request.priority)
        if hint.problem is not None:
            if not self.counters.total("invalid_hints"):
                logger.warning(
                    "Request %s: %s; served at its predicted level. Further invalid hints are "
                    "counted in semsched:invalid_hints_total only.",
                    request.request_id,
                    hint.problem,
                )
            self.counters.add("invalid_hints")
        job = core.new_job(
            request.request_id,
            arrival=self.clock(),
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=hint,
            awaits_prediction=self.predictions.submit(request, hint),
            tenant=read_tenant(extra_args),
        )
        self.counters.add("requests", hint.source.value)
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
            seats=self.capacity.free_seats(),
            blocks=self.capacity.free_for_admission(),
            prefill_tokens=self.max_num_scheduled_tokens - len(self.running),
        )
        requests, capacity = self.requests, self.capacity
        for victim in choose_evictions(
            core,
            room,
            ready=lambda job: is_ready(self, requests[job.request_id]),
            needed_blocks=lambda job: capacity.needed(requests[job.request_id]),
            freeable_blocks=self._freed_at_once,
            preemption_seconds=lambda job: (
                self.preemptions.plan(job, requests[job.request_id]).seconds
            ),
        ):
            self.evict(requests[victim.request_id], "urgent")

    def _keep_reservations(self, core: SchedulingCore) -> None:
        """Preempt what has grown into a hard reservation, or beyond its tenant's part."""
        while (found := core.eviction.intruder()) is not None:
            job, reason = found
            if self._freed_at_once(job) is None:
                break
            self.evict(self.requests[job.request_id], reason)

    def _freed_at_once(self, job: Job) -> int | None:
        request = self.requests[job.request_id]
        # Blocks that a step in flight may still write do not come free at once.
        if not blocks_can_be_freed(self, request):
            return None
        return blocks_freed_by(self, request)

    def evict(self, request: Request, reason: str) -> None:
        """Preempt a running request between two steps.

        Args:
            reason: a value of the label `reason` of `semsched:preemptions_total`.
        """
        self._preempting_for = reason
        try:
            preempt(self, request)
        finally:
            self._preempting_for = "kv_shortage"
        if reason == "urgent":
            self.counters.add("admission_preemptions")

    def _take_in_admitted(self, core: SchedulingCore) -> None:
        """vLLM appends what it admits to self.running; move those to their place."""
        admitted: list[Request] = []
        while self.running:
            job = self.jobs.get(self.running[-1].request_id)
            if job is None or job.state is JobState.RUNNING:
                break
            admitted.append(self.running.pop())
        for request in reversed(admitted):
            with self._guard("starting a request"):
                job = self.jobs[request.request_id]
                self._observe(job)
                core.start(job)
                self.preemptions.resumed(request)
            self._insert(core, request)

    def _revise(self, core: SchedulingCore, jobs: list[Job]) -> None:
        self._reposition(core, jobs)
        self.overload.revised(jobs)

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
                core.running.order(self.jobs[request.request_id]),
                key=lambda other: core.running.order(self.jobs[other.request_id]),
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

    def gauges(self) -> Gauges:
        """The values of all gauges; brings counters that are counted elsewhere up to date."""
        core = self.core
        if self._event_log is not None:
            self._event_log.report(self.counters)
        gauges = {
            **self._request_metrics.gauges(),
            **self.overload.gauges(),
            **self.predictions.gauges(),
            **report_fairness(core, self.counters),
            **self.preemptions.gauges(),
            "unpredicted_requests": core.waiting.buffered,
        }
        version = self.live_policy.version
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
