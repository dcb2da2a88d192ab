"""SemanticScheduler: vLLM's V1 scheduler with the policy core's order and preemption.

It never copies `schedule()`; it arranges vLLM's own queues before each step and looks at what
came out afterwards. All state about requests lives in `policy.core`.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from vllm_semantic_sched.engine.clock import ServiceClock, StepClock, batch_of
from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.live_policy import LivePolicy, reload_on_hangup
from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.engine.metrics.requests import (
    RequestMetrics,
    report_fairness,
    report_overload,
)
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.requests.arrivals import Arrivals
from vllm_semantic_sched.engine.requests.client_requests import ClientRequests
from vllm_semantic_sched.engine.requests.endings import Endings, end_of
from vllm_semantic_sched.engine.requests.prediction import PredictionFeed
from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.engine.startup.auto_profile import engine_profile
from vllm_semantic_sched.engine.startup.settings import load_settings
from vllm_semantic_sched.engine.view import VllmView, engine_capacity
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
    let_prefills_run,
    replace_queues,
    shares_host,
    watch_new_requests,
    why_no_holds,
)
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.eviction.retention import PreemptionKind
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.overload.refusal import DROPPED, Refusal
from vllm_semantic_sched.policy.profile.formula import AUTO, EngineProfile
from vllm_semantic_sched.policy.step import SchedulingStep

# Under vLLM's own logger, so that its handlers and levels apply.
logger = logging.getLogger("vllm.semantic_sched")


class SemanticScheduler(HookedScheduler):
    """Serves the most urgent requests first, and the shortest first among equals.

    Given to vLLM by `--scheduler-cls vllm_semantic_sched.SemanticScheduler`. Under the base policy
    `fcfs` the instance is vLLM's own scheduler; where vLLM schedules asynchronously it is an
    `AsyncSemanticScheduler`.

    Raises:
        PolicyError: at construction, if policy or profile cannot be used.

    Attributes:
        core: the policy's decisions and its state.
        jobs: the policy's view of each request, by request id.
        counters: what `/metrics` reports.
        clock: seconds during which the engine was serving.
    """

    _settings: tuple[Policy, EngineProfile]  # set by __new__ for __init__

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        watch_new_requests()
        policy = load_settings(vllm_config.additional_config)
        asynchronous = vllm_config.scheduler_config.async_scheduling
        if policy.base == "fcfs":
            logger.info("Semantic scheduling: base policy fcfs, vLLM's own scheduler.")
            stock = AsyncScheduler if asynchronous or issubclass(cls, AsyncScheduler) else Scheduler
            scheduler = stock(vllm_config, *args, **kwargs)
            commands.install(scheduler)
            return scheduler
        if cls is SemanticScheduler and asynchronous:
            cls = AsyncSemanticScheduler
        self = super().__new__(cls)
        commands.install(self)
        self._settings = (policy, engine_profile(policy, vllm_config, starting=True))
        return self

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        policy, profile = self._settings
        super().__init__(vllm_config, *args, **kwargs)
        self.counters = Counters()
        self.clock = ServiceClock()
        self.step_clock = StepClock()
        self.jobs: dict[str, Job] = {}
        self.guard = Guard(self.counters, logger)
        self.core = core = SchedulingCore(
            policy, profile, clock=self.clock, on_error=self.guard.failed
        )
        self._request_metrics = RequestMetrics(core, self.counters)
        self._event_log = self._open_event_log(core)
        if self._event_log is not None:
            core.lifecycle.listeners.append(self._event_log)
        core.lifecycle.later_listeners.append(self._request_metrics)
        # self.running is kept sorted, so the tail, where vLLM takes its victims, is the least
        # urgent request.
        replace_queues(
            self,
            SemanticRequestQueue(core, self.jobs, core.waiting, self.guard),
            SemanticRequestQueue(core, self.jobs, core.new_queue(), self.guard),
        )
        core.set_capacity(engine_capacity(self), 1 + self.num_spec_tokens)
        self._endings = Endings(self)
        self._clients = ClientRequests(self.refuse, self.counters, logger)
        self.preemptions = Preemptions(self, core, self._endings, self.counters, logger)
        self.predictions = PredictionFeed(
            *(core, self.jobs, self.structured_output_manager, self.counters, logger),
            # vLLM starts all engines of a server from one process.
            group=str(os.getppid()) if shares_host(vllm_config) else None,
        )
        self.arrivals = Arrivals(core, self.predictions, self.jobs.__contains__, self.can_refuse)
        self.step = SchedulingStep(core)
        self.view = VllmView(
            *(self, core, self.jobs, self.clock, self.guard),
            predictions=self.predictions.take,
            preemptions=self.preemptions,
            end=self._clients.end,
        )
        self.live_policy = LivePolicy(core, self._reload, self.counters, logger)
        if reload_on_hangup(self.live_policy.request_load):
            self.live_policy.start()
        self._report_settings(policy, profile)

    def _report_settings(self, policy: Policy, profile: EngineProfile) -> None:
        logger.info("Semantic scheduling: base policy %s, profile %s.", policy.base, profile.source)
        protection = self.core.protection
        if protection.enabled and (reason := why_no_holds(self.vllm_config)) is not None:
            protection.unsafe = True
            logger.warning("Semantic scheduling: protect is off, because of %s.", reason)
        if policy.profile != AUTO:
            for doubt in profile.doubts(self.max_model_len):
                logger.warning("Semantic scheduling: %s.", doubt)

    # vLLM's interface

    def add_request(self, request: Request) -> None:
        if request.request_id in self.jobs:
            super().add_request(request)
            return
        if self.live_policy.loaded is not None:
            self._adopt_policy()
        arrival = None
        try:  # not `with`: a burst of arrivals delays the next step
            arrival = self.arrivals.take(request)
            self.core.arrive(arrival.job, self.clock())
            self.jobs[request.request_id] = arrival.job
        except Exception:
            self.guard.failed("reading a new request")
            with self.guard("serving a request that could not be read"):
                job = self.arrivals.unread(request)
                self.jobs[request.request_id] = self.core.arrive(job, self.clock())
        super().add_request(request)
        if arrival is not None:
            try:
                self._clients.arrived(arrival, self.step, self.view)
            except Exception:
                self.guard.failed("admitting a request")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begin = time.perf_counter()
        self._adopt_policy()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.view.restore_limits()
            with self.guard("taking in admitted requests"):
                self._take_in_admitted()
            with self.guard("ending requests"):
                self._endings.end_deferred()
            self.counters.observe("schedule_seconds", time.perf_counter() - begin)
        if not output.total_num_scheduled_tokens:
            self.core.protection.achieved_nothing()
        with self.guard("timing steps"):
            batch = batch_of(output, self.requests, self.num_spec_tokens, self.view.tokens_held())
            self.step_clock.scheduled(output, batch, time.monotonic())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        with self.guard("timing steps"):
            step = self.step_clock.finished(scheduler_output, time.monotonic())
            if step is not None:
                self.core.estimates.observe_step(*step)
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        with self.guard("noting first tokens"):
            self._note_first_tokens()
        with self.guard("timing resumptions"):
            self.preemptions.watch()
        with self.guard("telling clients of refused requests"):
            self._endings.deliver(outputs)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard("dropping host copies"):
            self.preemptions.lose_copies(self.jobs)
        with self.preemptions.because("reset"):
            return super().reset_prefix_cache(*args, **kwargs)

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
            with self.guard("reporting statistics"):
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
        with self.guard("stopping the predictor"):
            self.predictions.close()
        self.live_policy.close()
        if self._event_log is not None:
            with self.guard("closing the event log"):
                self._event_log.close()
        super().shutdown()

    # Hooks of HookedScheduler

    def before_step(self) -> None:
        if self.step.run(self.view).protected_prefill:
            let_prefills_run(self)
        self._endings.defer()

    def before_preemption(self, request: Request, keep_kv: bool) -> None:
        with self.guard("preempting a request"):
            job = self.jobs[request.request_id]
            plan = self.preemptions.begin(job, request, keep_kv)
            if plan.kind is PreemptionKind.DROP:
                self.refuse(request.request_id, DROPPED)  # once it is back in the queue

    def on_new_request(self, request: Request) -> None:
        self.arrivals.prepare(request)

    def before_free(self, request: Request) -> None:
        job = self.jobs.pop(request.request_id, None)
        with self.guard("finishing a request"):
            self.preemptions.finished(request)
            if job is not None:
                self.predictions.cancel(job)
                job.generated = request.num_output_tokens
                if job.generated:
                    self.core.lifecycle.first_token(job)
                end = end_of(request, self._endings.refusal, self.predictions.decode)
                self.core.finish(job, end.ending, end.state, end.reason)
        if job is not None:
            with self.guard("forgetting a request"):
                self.core.forget(job)

    # Ours

    def _reload(self) -> tuple[Policy, EngineProfile]:
        """Read the server's policy and profile again. Runs on a thread of its own."""
        policy = load_settings(self.vllm_config.additional_config)
        return policy, engine_profile(policy, self.vllm_config, starting=False)

    def _adopt_policy(self) -> None:
        """Put a policy that was reloaded in force, between steps."""
        if self.live_policy.loaded is not None:
            with self.guard("adopting a policy"):
                self.live_policy.adopt()

    def _take_in_admitted(self) -> None:
        """vLLM appends what it admits to self.running; move those to their place."""
        admitted: list[Request] = []
        while self.running:
            job = self.jobs.get(self.running[-1].request_id)
            if job is None or job.state is JobState.RUNNING:
                break
            admitted.append(self.running.pop())
        for request in reversed(admitted):
            with self.guard("starting a request"):
                job = self.jobs[request.request_id]
                self.view.observe(job)
                self.core.start(job)
                self.preemptions.resumed(request)
            self.view.insert(request)

    def _open_event_log(self, core: SchedulingCore) -> EventLog | None:
        settings = core.policy.events
        if settings.path is None:
            return None
        engine = self.vllm_config.parallel_config.data_parallel_index
        return EventLog(settings, engine, lambda: core.policy.tier_names, logger)

    def _note_first_tokens(self) -> None:
        """O(requests that were admitted and have no token yet)."""
        starting = self.core.lifecycle.starting
        for job in list(starting):
            request = self.requests.get(job.request_id)
            if request is None:  # an error in between: its end was not noted
                del starting[job]
            elif request.num_output_tokens:
                self.step.first_token(self.view, job)

    def gauges(self) -> Gauges:
        """The values of all gauges; brings counters that are counted elsewhere up to date."""
        core = self.core
        if self._event_log is not None:
            self._event_log.report(self.counters)
        gauges = {
            **self._request_metrics.gauges(),
            **report_overload(core),
            **self.predictions.gauges(),
            **report_fairness(core, self.counters),
            **self.preemptions.gauges(),
            "unpredicted_requests": core.waiting.buffered,
        }
        version = self.live_policy.version
        gauges |= {"policy_version": version.number, "policy_hash": version.as_number}
        scale = core.estimates.scale
        gauges["profile_scale"] = {
            "prefill": scale.prefill,
            "decode": scale.decode,
            "batch": scale.batch,
            "load": scale.load,
        }
        self.counters.raise_to("hold_steps", core.protection.steps)
        self.counters.raise_to("tokens_forgone", core.protection.tokens_forgone)
        if core.protection.enabled:
            gauges["hold_cost"] = core.protection.budget.share
        if core.estimates.length_ratio is not None:
            gauges["length_ratio"] = core.estimates.length_ratio
        return gauges


class AsyncSemanticScheduler(SemanticScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""
