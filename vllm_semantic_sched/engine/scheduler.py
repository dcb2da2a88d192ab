"""SemanticScheduler: vLLM's V1 scheduler with the policy core's order and preemption. It never
copies `schedule()`; it arranges vLLM's own queues before each step and looks at what came out."""

import os
from collections.abc import Collection, Iterable
from typing import Any

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.apply import Applier
from vllm_semantic_sched.engine.clock import (
    ServiceClock,
    StepClock,
    StepSamples,
    batch_of,
    monotonic,
)
from vllm_semantic_sched.engine.guard import Guard, logger
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.live_policy import CanaryDriver, LivePolicy, reload_on_hangup
from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.metrics.event_log import EventLog
from vllm_semantic_sched.engine.metrics.gauges import RequestMetrics, gauges_of
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.requests.arrivals import Arrivals
from vllm_semantic_sched.engine.requests.endings import (
    Endings,
    RecentReadings,
    end_of,
    is_part_of_beam,
)
from vllm_semantic_sched.engine.requests.prediction import PredictionFeed
from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.engine.snapshot import VllmSnapshot
from vllm_semantic_sched.engine.startup.auto_profile import engine_profile
from vllm_semantic_sched.engine.startup.settings import load_settings, parse_settings
from vllm_semantic_sched.engine.vllm_api import PauseState, Request, SchedulerOutput, VllmConfig
from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.config import AUTO, Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile

_MOST_MEASURED = 64  # lengths of encoder inputs for which the room beside them is remembered


class SemanticScheduler(vllm_api.HookedScheduler):
    """Serves the most urgent requests first, and the shortest first among equals. Under the base
    policy `fcfs` the instance is vLLM's own scheduler; where vLLM schedules asynchronously it is an
    `AsyncSemanticScheduler`. Raises PolicyError if policy or profile cannot be used, ValueError if
    it must not run on such an engine.

    Attributes:
        core: the policy's decisions and its state.
        jobs: the policy's view of each request, by request id.
        counters: what `/metrics` reports.
        observing: vLLM orders the requests by itself (policy key `observe`).
    """

    _settings: tuple[Policy, EngineProfile]  # set by __new__ for __init__

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        vllm_api.watch_new_requests()
        if (refusal := vllm_api.why_refused(vllm_config)) is not None:
            raise ValueError(f"Semantic scheduling: {refusal}.")
        policy = load_settings(vllm_config.additional_config)
        asynchronous = vllm_config.scheduler_config.async_scheduling
        if policy.base == "fcfs":
            name = parse_settings(vllm_config.additional_config).policy
            logger.info("Semantic scheduling: policy %s, base fcfs, vLLM's own scheduler.", name)
            if policy.without_effect:
                keys = ", ".join(policy.without_effect)
                logger.warning("Semantic scheduling: under base: fcfs no effect: %s.", keys)
            asynchronous = asynchronous or issubclass(cls, vllm_api.AsyncScheduler)
            stock = vllm_api.AsyncScheduler if asynchronous else vllm_api.Scheduler
            scheduler = stock(vllm_config, *args, **kwargs)
            vllm_api.add_utility(scheduler, commands.UTILITY, commands.run)
            return scheduler
        if (refusal := vllm_api.why_unordered(vllm_config)) is not None:
            raise ValueError(f"Semantic scheduling: {refusal}.")
        if cls is SemanticScheduler and asynchronous:
            cls = AsyncSemanticScheduler
        self = super().__new__(cls)
        vllm_api.add_utility(self, commands.UTILITY, commands.run)
        self._settings = (policy, engine_profile(policy, vllm_config, starting=True))
        return self

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        policy, profile = self._settings
        super().__init__(vllm_config, *args, **kwargs)
        self.counters = Counters()
        self.clock = ServiceClock()
        self.step_clock = StepClock()
        self.jobs: dict[str, Job] = {}
        self.guard = Guard(self.counters.add)
        self.core = core = SchedulingCore(
            policy, profile, clock=self.clock, on_error=self.guard.failed
        )
        self._event_log = self._open_event_log(core)
        metrics = RequestMetrics(core, self.counters)
        if self._event_log is not None:
            metrics.watch_order()
        core.lifecycle.later_listeners.append(metrics)
        # Each group of layers has blocks of its own.
        blocks = vllm_api.total_kv_blocks(self) // vllm_api.kv_cache_groups(self) or None
        capacity = EngineCapacity(vllm_api.seats(self), blocks, self.block_size)
        core.set_capacity(capacity, 1 + self.num_spec_tokens)
        self._room_beside: dict[int, int] = {}  # see `_kv_tokens`, by tokens of encoder inputs
        self._cache_order = vllm_api.CacheOrder(
            self,
            share=lambda: core.policy.retention.cache_share,
            failed=lambda: self.guard.failed("cache_order"),
        )
        self._endings = Endings(self)
        self.preemptions = Preemptions(self, core, self._endings, self.counters)
        self.predictions = PredictionFeed(
            core=core,
            jobs=self.jobs,
            tokenizer=getattr(self.structured_output_manager, "tokenizer", None),
            counters=self.counters,
            # vLLM starts all engines of a server from one process.
            group=str(os.getppid()) if vllm_api.shares_host(vllm_config) else None,
        )
        self.samples = StepSamples()
        self.arrivals = Arrivals(
            core=core,
            jobs=self.jobs,
            predictions=self.predictions,
            endings=self._endings,
            counters=self.counters,
            most_kv_tokens=self._kv_tokens,
            logs_blocks=self._event_log is not None and self.hash_block_size == self.block_size,
        )
        self.readings = RecentReadings()
        core.sharing.may_sit_out = vllm_api.can_sit_out(vllm_config)
        self.applier = Applier(
            scheduler=self,
            core=core,
            jobs=self.jobs,
            guard=self.guard,
            preemptions=self.preemptions,
            endings=self._endings,
            now=self.clock,
        )
        self.observing = policy.observe
        if not self.observing:
            self.applier.take_over(self._observe)
        self.canary = CanaryDriver(core, self._switch)
        self.live_policy = LivePolicy(core, self._reload, self._replace, self.counters)
        if reload_on_hangup(self.live_policy.request_load):
            self.live_policy.start()
        self._report_settings(policy, profile)

    def _kv_tokens(self, request: Request) -> int:
        """See `vllm_api.most_kv_tokens`."""
        with self.guard("kv_size"):
            encoded = vllm_api.encoder_tokens(self, request)
            if encoded not in self._room_beside:
                if len(self._room_beside) > _MOST_MEASURED:
                    self._room_beside.clear()
                self._room_beside[encoded] = vllm_api.most_kv_tokens(self, encoded)
            return self._room_beside[encoded]
        return self.max_model_len

    def _report_settings(self, policy: Policy, profile: EngineProfile) -> None:
        logger.info(
            "Semantic scheduling: policy %s, base %s, %d levels, profile %s.",
            parse_settings(self.vllm_config.additional_config).policy,
            policy.base,
            policy.levels,
            profile.source,
        )
        if policy.uses_urgency and "honor" in (policy.hints.urgency, policy.hints.priority):
            logger.info(
                "Semantic scheduling: every client may claim level 0 (%s). `hints` in the policy "
                "limits that, where not all clients are trusted.",
                policy.tier_names[0],
            )
        if self.observing:
            logger.info("Semantic scheduling: observing only, in vLLM's own order.")
        if self.scheduler_config.policy == "priority" and policy.hints.priority in ("honor", "cap"):
            logger.warning(
                "Semantic scheduling: --scheduling-policy priority has no effect. A request's "
                "priority is its urgency level, and 0 leaves the level to the text; "
                "`hints: {priority: vllm}` in the policy keeps vLLM's meaning."
            )
        if limits := vllm_api.limits_on_all(self.vllm_config):
            logger.warning(
                "Semantic scheduling: %s refuses urgent requests like others, before they are "
                "seen here; `admission: {queue: {requests: N}}` in the policy does not.",
                " and ".join(limits),
            )
        protection = self.core.protection
        if protection.enabled and (reason := vllm_api.why_no_holds(self.vllm_config)) is not None:
            protection.unsafe = True
            logger.warning("Semantic scheduling: protect is off, because of %s.", reason)
        if policy.profile != AUTO:
            for warning in profile.warnings(self.max_model_len):
                logger.warning("Semantic scheduling: %s.", warning)

    # vLLM's interface

    def add_request(self, request: Request) -> None:
        if request.request_id in self.jobs:
            super().add_request(request)
            return
        # A burst of arrivals delays the next step: no call, and no `with`, without need.
        if self.canary.running is not None or self.live_policy.loaded is not None:
            self._adopt_policy()
        arrival = None
        try:
            arrival = self.arrivals.prepared(request)
            self.core.arrive(arrival.job, self.clock())
            self.jobs[request.request_id] = arrival.job
        except Exception:
            self.guard.failed("arrival")
            with self.guard("unread_arrival"):
                job = self.arrivals.unread(request)
                self.jobs[request.request_id] = self.core.arrive(job, self.clock())
        super().add_request(request)
        if arrival is not None:
            try:
                self.arrivals.arrived(arrival, None if self.observing else self.snapshot)
            except Exception:
                self.guard.failed("admission")

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        begin = monotonic()
        self._adopt_policy()
        if self.observing:
            output = super().schedule(*args, **kwargs)
            with self.guard("observed_step"):
                if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids:
                    self._take_in_admitted()
                if (waits := self.core.lifecycle.waits) is not None:
                    waits.because(self._why_waiting(output))
                self._sample(output, begin)
                self.counters.observe("schedule_seconds", monotonic() - begin)
            return output
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            with self.guard("limit_reset"):
                self.applier.restore_limits()
            with self.guard("admitted"):
                self._take_in_admitted()
            with self.guard("endings"):
                self._endings.end_deferred()
            with self.guard("step_times"):
                self.counters.observe("schedule_seconds", monotonic() - begin)
        with self.guard("waits"):
            tokens_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
            step.filled(self.core, self.snapshot(), tokens_left)
        with self.guard("step_times"):
            if not output.total_num_scheduled_tokens and self.core.protection.held:
                step.achieved_nothing(self.core)
            batch = batch_of(output, self.requests, self.running, self.num_spec_tokens)
            self.step_clock.scheduled(output, batch, begin)
            self._sample(output, begin, batch)
        return output

    def _sample(self, output: SchedulerOutput, begin: float, batch: Batch | None = None) -> None:
        """Begin to time a step for the event log. `batch`: what it holds, if that is known."""
        if self._event_log is not None and output.total_num_scheduled_tokens:

            def read() -> Batch:
                if batch is not None:
                    return batch
                return batch_of(output, self.requests, self.running, self.num_spec_tokens)

            self.samples.scheduled(output, begin, read)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: vllm_api.ModelRunnerOutput,
        *args: Any,
        **kwargs: Any,
    ) -> dict[int, vllm_api.EngineCoreOutputs]:
        now = monotonic()
        if self._event_log is not None:
            with self.guard("step_times"):
                self.samples.finished(scheduler_output, now)
        if not self.observing:
            with self.guard("step_times"):
                measured = self.step_clock.finished(scheduler_output, now)
                if measured is not None:
                    self.core.estimates.observe_step(*measured)
            if self.connector is not None:
                output = model_runner_output.kv_connector_output
                self.preemptions.make_up_for_failures(self.jobs, output)
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        with self.guard("first_tokens"):  # O(admitted requests that have no token yet)
            starting = self.core.lifecycle.starting
            for job in list(starting):
                request = self.requests.get(job.request_id)
                if request is None:  # an error in between: its end was not noted
                    del starting[job]
                elif request.num_output_tokens:
                    self.core.first_token(job)
        if not self.observing and self.preemptions.returning:
            with self.guard("resumptions"):
                self.preemptions.watch(self.jobs)
        with self.guard("refusals"):
            self._endings.deliver(outputs)
        with self.guard("step_times"):
            if not self.requests:
                self.samples.idle()
                self.step_clock.idle()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        with self.guard("host_copies"):
            self.preemptions.lose_copies(self.jobs)
        with self.preemptions.because("reset"):
            done = super().reset_prefix_cache(*args, **kwargs)
        with self.guard("cache_order"):
            if done:
                self._cache_order.clear()
        return done

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            with self.guard("statistics"):
                idle = not self.requests
                message = self.counters.take_message(self.gauges, monotonic(), idle)
                if message is not None:
                    vllm_api.attach_message(stats, message)
        return stats

    def set_pause_state(self, pause_state: PauseState) -> None:
        super().set_pause_state(pause_state)
        with self.guard("pause"):
            self.step_clock.idle()
            if pause_state is PauseState.UNPAUSED:
                self.clock.resume()
            else:
                self.clock.pause()
        with self.guard("waits"):
            step.filled(self.core, self.snapshot())

    def shutdown(self) -> None:
        for part in (self.predictions, self.live_policy, self._event_log):
            with self.guard("shutdown"):
                if part is not None:
                    part.close()
        super().shutdown()

    # Hooks of HookedScheduler

    def before_step(self) -> None:
        if self.observing:
            with self.guard("predictions"):
                came = list(self.predictions.drain())
                for job, prediction in came:
                    self.core.predicted(job, prediction)
                if came:
                    self.predictions.applied()
            return
        with self.guard("step"):
            predictions: list[tuple[Job, Prediction | None]] = []
            with self.guard("predictions"):
                predictions.extend(self.predictions.drain())
            self.applier.begin_step()
            returning = self.applier.gate.returning(bool(self.core.with_kv))
            snapshot = self.snapshot(predictions, returning)
            orders = step.step(self.core, snapshot, self.clock(), self.guard)
            self.applier.apply(orders)
        with self.guard("predictions"):
            self.predictions.applied()
        with self.guard("endings"):
            self._endings.defer()

    def before_preemption(self, request: Request, keep_kv: bool) -> None:
        with self.guard("preemption"):
            if not self.observing:  # nobody keeps seats, nor forgets the request later
                self.applier.gate.preempted(request)
            job = self.jobs[request.request_id]
            self.preemptions.begin(job, request, keep_kv and not self.observing)

    def after_turn(self, request: Request) -> None:
        with self.guard("session"):
            vllm_api.compute_again(self, request)
        with self.guard("session_input"):
            self.arrivals.turn(self.jobs[request.request_id], request)
            for queue in (self.waiting, self.kv_holding_waiting):
                if isinstance(queue, SemanticRequestQueue):
                    queue.reposition(request)

    def preprocess_request(self, request: Request) -> None:
        try:
            self.arrivals.prepare(request)
        except Exception:  # it is read on arrival
            logger.debug("Semantic scheduling could not read a request ahead.", exc_info=True)

    def before_free(self, request: Request) -> None:
        job = self.jobs.pop(request.request_id, None)
        with self.guard("finish"):
            if job is not None:
                if job.preempted.times:
                    self.preemptions.finished(request)
                if not job.level and self.core.policy.retention.cache_share:
                    self._cache_order.keep(request)
                self.predictions.cancel(job)
                if not job.state.is_end:  # else the policy itself has ended it
                    self._finish(job, request)
                if self._event_log is not None and not is_part_of_beam(request):
                    self.readings.keep(job)
        if job is not None:
            with self.guard("removal"):
                self.core.forget(job)

    def _finish(self, job: Job, request: Request) -> None:
        job.generated = request.num_output_tokens
        if job.generated:
            self.core.lifecycle.first_token(job)
        refusal = self._endings.refusal
        end, state, reason = end_of(request, refusal, self.predictions.tokenizer)
        beneficiary = None if refusal is None else refusal.beneficiary
        self.core.finish(job, end, state, reason, beneficiary)

    # Ours

    def snapshot(
        self,
        predictions: Iterable[tuple[Job, Prediction | None]] = (),
        returning: Collection[Job] = (),
    ) -> VllmSnapshot:
        """vLLM's accounts, as they are now; see `VllmSnapshot`."""
        return VllmSnapshot(
            self, self.jobs, self.preemptions, self._endings.can_end, predictions, returning
        )

    def _observe(self, job: Job) -> None:
        request = self.requests[job.request_id]
        job.computed = request.num_computed_tokens
        job.generated = request.num_output_tokens

    def _why_waiting(self, output: SchedulerOutput) -> Cause:
        """What kept vLLM's waiting requests from starting in a step that only it has decided."""
        if self.pause_state is not PauseState.UNPAUSED:
            return Cause.PAUSED
        if vllm_api.free_seats(self) <= vllm_api.loaded(self):
            return Cause.SEAT
        if not self.waiting:
            return Cause.STEP
        spent = output.total_num_scheduled_tokens >= self.max_num_scheduled_tokens
        return Cause.TOKENS if spent or output.preempted_req_ids else Cause.KV

    def _reload(self) -> tuple[Policy, EngineProfile]:
        """Runs on a thread of its own."""
        policy = load_settings(self.vllm_config.additional_config)
        return policy, engine_profile(policy, self.vllm_config, starting=False)

    def _replace(self, policy: Policy, profile: EngineProfile) -> None:
        self.canary.stop("the policy was reloaded")
        self._switch(policy, profile)

    def _switch(self, policy: Policy, profile: EngineProfile | None = None) -> None:
        """Put another policy in force, with the same profile by default."""
        if policy.observe and not self.observing:
            self.applier.hand_back()
        elif self.observing and not policy.observe:
            self.applier.take_over(self._observe)
        self.observing = policy.observe
        self.step_clock.idle()  # it does not time steps that are only observed
        self.core.switch(policy, self.core.estimates.scale.given if profile is None else profile)

    def _adopt_policy(self) -> None:
        """Between steps, put a policy in force that was reloaded, or whose turn it is."""
        if self.canary.running is not None:
            with self.guard("canary"):
                self.canary.drive()
        if self.live_policy.loaded is not None:
            with self.guard("policy_reload"):
                self.live_policy.apply_loaded()

    def _take_in_admitted(self) -> None:
        """vLLM appends what it admits to self.running; move those to their place."""
        admitted: list[Request] = []
        while self.running:
            job = self.jobs.get(self.running[-1].request_id)
            if job is None or job.state is JobState.RUNNING:
                break
            admitted.append(self.running.pop())
        for request in reversed(admitted):
            with self.guard("start"):
                job = self.jobs[request.request_id]
                self._observe(job)
                self.core.start(job)
                if job.preempted.times:
                    self.preemptions.resumed(request)
            if self.observing:
                self.running.append(request)
            else:
                self.applier.insert(request)

    def _open_event_log(self, core: SchedulingCore) -> EventLog | None:
        settings = core.policy.events
        if settings.path is None:
            return None
        engine = self.vllm_config.parallel_config.data_parallel_index
        log = EventLog(
            settings,
            engine,
            lambda: core.policy.tier_names,
            policy_hash=lambda: self.live_policy.version.fingerprint,
            model=core.policy.predictor.model if core.policy.reads(hinted=False) else "",
        )
        core.lifecycle.listeners.append(log)
        core.record_why(log, monotonic)
        return log

    def gauges(self) -> Gauges:
        """All gauges; brings counters that are counted elsewhere up to date."""
        return gauges_of(self, self._event_log)

    def report(self) -> dict[str, Any] | None:
        """What is new for the metrics, between two steps; None for nothing. An engine that idles
        writes no line about itself into the event log."""
        return self.counters.take_message(
            lambda: gauges_of(self, self._event_log, describes=bool(self.requests)),
            monotonic(),
            idle=True,
        )


class AsyncSemanticScheduler(SemanticScheduler, vllm_api.AsyncScheduler):
    """The same over vLLM's asynchronous scheduler."""
