"""What a scheduling step asks of vLLM and orders from it (`policy.view.EngineView`)."""

import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.engine.vllm_api import PauseState, Request, Scheduler
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.waits import Cause
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.view import StageLimits

# More requests than that are put into order by sorting all.
_FEW = 4


@dataclass(eq=False)
class VllmView:
    """Answers from vLLM's own accounts; orders go to the scheduler."""

    scheduler: Scheduler
    core: SchedulingCore
    jobs: dict[str, Job]  # by request id
    guard: Guard
    preemptions: Preemptions
    now: Callable[[], float]  # seconds during which the engine was serving
    predictions: Callable[[], Iterable[tuple[Job, Prediction | None]]]  # since the last call
    end: Callable[[Job, Refusal], None]  # a job without its answer
    _saved_budget: int | None = field(default=None, init=False)
    _held_decodes: int = field(default=0, init=False)

    # Questions, see `EngineView`

    def observe(self, job: Job) -> None:
        request = self._request(job)
        job.computed = request.num_computed_tokens
        job.generated = request.num_output_tokens

    def running_by_urgency(self) -> Sequence[Job]:
        return self._jobs_of(self.scheduler.running)

    def can_advance(self, job: Job) -> bool:
        return vllm_api.can_advance(self.scheduler, self._request(job))

    def prefilling(self) -> Collection[Job]:
        prefills = self._jobs_of(vllm_api.inflight_prefills(self.scheduler))
        for job in prefills:
            self.observe(job)
        return prefills

    def most_urgent_decode(self) -> Job | None:
        running = self.scheduler.running
        if not running or running[0].is_prefill_chunk:
            return None
        return self.jobs[running[0].request_id]

    def is_paused(self) -> bool:
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def free_seats(self) -> int:
        """Seats that waiting requests can take in the coming step; may be negative."""
        scheduler = self.scheduler
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        # vLLM seats waiting requests that hold blocks before all others.
        return scheduler.max_num_active_reqs - taken - len(scheduler.kv_holding_waiting)

    def free_blocks(self) -> int:
        """Free blocks, less vLLM's watermark, less one for each running request that is about to
        begin a block. O(running)."""
        scheduler = self.scheduler
        block_size = scheduler.block_size
        starting = sum(one.num_computed_tokens % block_size == 0 for one in scheduler.running)
        free = vllm_api.free_kv_blocks(scheduler)
        return free - scheduler.kv_cache_manager.watermark_blocks - starting

    def kv_use(self) -> float:
        return self.scheduler.kv_cache_manager.usage

    def token_budget(self) -> float:
        return self.scheduler.max_num_scheduled_tokens

    def decode_tokens(self) -> int:
        scheduler = self.scheduler
        prefills = len(vllm_api.inflight_prefills(scheduler))
        decoding = len(scheduler.running) - prefills - self._held_decodes
        return decoding * (1 + scheduler.num_spec_tokens)

    def is_ready(self, job: Job) -> bool:
        return vllm_api.is_ready(self.scheduler, self._request(job))

    def needed_blocks(self, job: Job) -> int:
        return vllm_api.blocks_needed(self.scheduler, self._request(job))

    def freeable_blocks(self, job: Job) -> int | None:
        return vllm_api.freeable_blocks(self.scheduler, self._request(job))

    def preemption_seconds(self, job: Job) -> float:
        return self.preemptions.plan(job, self._request(job)).seconds

    # Orders

    def reposition(self, jobs: Iterable[Job]) -> None:
        running = self.scheduler.running
        moved = {self._request(job): None for job in jobs if job.state is JobState.RUNNING}
        if len(moved) > _FEW:
            with self.guard("ordering running requests"):
                running.sort(key=self._order)
            return
        # All out before the first goes in again: a place is found among those that are in order.
        out = []
        for request in moved:
            with self.guard("ordering running requests"):
                running.remove(request)
                out.append(request)
        for request in out:
            self.insert(request)

    def insert(self, request: Request) -> None:
        """Put a request that has a seat into vLLM's list of running ones, in order of rank."""
        running = self.scheduler.running
        place = len(running)  # whatever fails, the request must not get lost
        with self.guard("ordering running requests"):
            place = bisect.bisect(running, self._order(request), key=self._order)
        running.insert(place, request)

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        self.preemptions.evict(self._request(job), reason, beneficiary)

    def hold(self, jobs: Collection[Job]) -> None:
        prefills = vllm_api.inflight_prefills(self.scheduler)
        for job in jobs:
            request = self._request(job)
            vllm_api.hold_for_one_step(self.scheduler, request)
            self._held_decodes += request not in prefills

    def limit_prefills(self, limits: StageLimits) -> None:
        scheduler = self.scheduler
        for job in limits.held:
            vllm_api.hold_for_one_step(scheduler, self._request(job))
        if not limits.gated:
            return
        if self._saved_budget is None:
            self._saved_budget = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = min(self.decode_tokens(), self._saved_budget)

    def restore_limits(self) -> None:
        self._held_decodes = 0
        if self._saved_budget is not None:
            self.scheduler.max_num_scheduled_tokens = self._saved_budget
            self._saved_budget = None

    # Whose order applies (policy key `observe`): both changes between two steps, O(n log n)

    def take_over(self) -> None:
        """Order waiting and running requests by the policy."""
        scheduler, core = self.scheduler, self.core
        before = [*scheduler.waiting], [*scheduler.kv_holding_waiting]
        queues = [
            SemanticRequestQueue(core, self.jobs, queue, self.guard)
            for queue in (core.waiting, core.new_queue())
        ]
        # The tail of self.running, where vLLM takes its victims, is the least urgent request.
        vllm_api.replace_queues(scheduler, *queues)
        for queue, requests in zip(queues, before, strict=True):
            for request in requests:
                queue.add_request(request)
        self.reposition(core.rank_running(self.observe))

    def hand_back(self) -> None:
        """Give vLLM its own queues again, with all requests in order of arrival."""
        scheduler, core, jobs = self.scheduler, self.core, self.jobs
        waiting, holding = list(scheduler.waiting), list(scheduler.kv_holding_waiting)
        core.hold((), self.now())
        for job in list(core.waiting):
            core.waiting.remove(job)

        def arrival(request: Request) -> int:
            job = jobs.get(request.request_id)
            return -1 if job is None else job.sequence

        vllm_api.restore_queues(scheduler)
        for request in sorted(waiting, key=arrival):
            scheduler.waiting.add_request(request)
        for request in sorted(holding, key=arrival):
            scheduler.kv_holding_waiting.add_request(request)
        scheduler.running.sort(key=arrival)

    def why_waiting(self, output: vllm_api.SchedulerOutput) -> Cause:
        """What kept vLLM's waiting requests from starting in a step that it has scheduled."""
        if self.is_paused():
            return Cause.PAUSED
        if self.free_seats() <= 0:
            return Cause.SEAT
        if not self.scheduler.waiting:
            return Cause.STEP
        spent = output.total_num_scheduled_tokens >= self.token_budget()
        return Cause.TOKENS if spent or output.preempted_req_ids else Cause.KV

    def _order(self, request: Request) -> tuple[float, float, int]:
        return self.core.running.order(self.jobs[request.request_id])

    def _request(self, job: Job) -> Request:
        return self.scheduler.requests[job.request_id]

    def _jobs_of(self, requests: Iterable[Request]) -> list[Job]:
        jobs = self.jobs
        return [jobs[one.request_id] for one in requests if one.request_id in jobs]
