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
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.view import PrefillLimits

# More requests than that are put into order by sorting all.
_FEW = 4

# Steps for which a seat is kept for a request that returns. A copy from the host takes fewer; KV
# from elsewhere can take hundreds, and the seat is worth more to others meanwhile.
_KEPT = 16

_UNLIMITED = 2**40  # KV blocks where the model needs none


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
    _held_decodes: int = field(default=0, init=False)
    _since: dict[Request, int] = field(default_factory=dict, init=False)  # first step of returning
    _stale: set[Request] = field(default_factory=set, init=False)  # preempted with output in flight
    _claims: list[float] = field(default_factory=list, init=False)  # levels of `keep_seats_for`
    _queues: list[SemanticRequestQueue] = field(default_factory=list, init=False)
    _claimed: set[str] = field(default_factory=set, init=False)  # the requests of these levels
    _first: Job | None = field(default=None, init=False)  # see `admit_first`
    _adapters: set[int] | None = field(default=None, init=False)  # in use when the step began

    def __post_init__(self) -> None:
        self._limits = vllm_api.StepLimits(self.scheduler)

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
        prefills = self._jobs_of(vllm_api.running_prefills(self.scheduler))
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
        # vLLM seats waiting requests that hold blocks before all others.
        return vllm_api.free_seats(self.scheduler) - vllm_api.loaded(self.scheduler)

    def loaded(self) -> Sequence[Job]:
        scheduler = self.scheduler
        if not vllm_api.loaded(scheduler):
            return ()
        jobs = self._jobs_of(scheduler.kv_holding_waiting)
        return [job for job in jobs if self.is_ready(job)]

    def idle(self) -> Sequence[Job]:
        sessions = self._jobs_of(vllm_api.idle_sessions(self.scheduler))
        return sorted(sessions, key=lambda job: (-job.effective_level, job.entered))

    def returning(self) -> Collection[Job]:
        scheduler = self.scheduler
        if self._stale:
            self._stale = {one for one in self._stale if vllm_api.is_stale(scheduler, one)}
        loading = vllm_api.loading(scheduler) if len(self.core.with_kv) else ()
        if not self._stale and not loading:
            self._since.clear()
            return ()
        step, since = scheduler.current_step, self._since
        self._since = {one: since.get(one, step) for one in (*self._stale, *loading)}
        return self._jobs_of(one for one, begun in self._since.items() if step < begun + _KEPT)

    def free_blocks(self) -> int:
        """Free blocks, less vLLM's watermark, less one for each running request that is about to
        begin a block. O(running)."""
        scheduler = self.scheduler
        if not vllm_api.total_kv_blocks(scheduler):
            return _UNLIMITED
        block_size = scheduler.block_size
        starting = sum(one.num_computed_tokens % block_size == 0 for one in scheduler.running)
        free = vllm_api.free_kv_blocks(scheduler)
        return free - scheduler.kv_cache_manager.watermark_blocks - starting

    def coming_blocks(self) -> int:
        return vllm_api.deferred_blocks(self.scheduler)

    def reserved_blocks(self) -> int:
        return vllm_api.reserved_blocks(self.scheduler)

    def obstacles(self, job: Job) -> Sequence[Collection[Job]]:
        groups = vllm_api.obstacles(self.scheduler, self._request(job))
        return [self._jobs_of(group) for group in groups]

    def kv_use(self) -> float:
        # A model without a KV cache never runs short of it.
        empty = not vllm_api.total_kv_blocks(self.scheduler)
        return 0.0 if empty else self.scheduler.kv_cache_manager.usage

    def token_budget(self) -> float:
        return self.scheduler.max_num_scheduled_tokens

    def decode_tokens(self) -> int:
        scheduler = self.scheduler
        prefills = len(vllm_api.running_prefills(scheduler))
        decoding = len(scheduler.running) - prefills - self._held_decodes
        return decoding * (1 + scheduler.num_spec_tokens)

    def is_ready(self, job: Job) -> bool:
        request = self._request(job)
        ready = vllm_api.is_ready(self.scheduler, request)
        return ready and not vllm_api.awaits_lookup(self.scheduler, request)

    def needed_blocks(self, job: Job) -> int:
        return vllm_api.blocks_needed(self.scheduler, self._request(job))

    def freeable_blocks(self, job: Job) -> int | None:
        return vllm_api.freeable_blocks(self.scheduler, self._request(job))

    def preemption_seconds(self, job: Job) -> float:
        request = self._request(job)
        plan = self.preemptions.plan(job, request)
        # What a step in flight computes for it is lost, too; the plan is about what there is.
        lost = self.core.profile.prefill(job.computed, request.num_computed_tokens)
        return plan.seconds + lost

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
        if job.state is JobState.RUNNING:  # else it has ended with another answer to its prompt
            self.preemptions.evict(self._request(job), reason, beneficiary)
        elif job in self.core.with_kv:
            self.preemptions.release(self._request(job))

    def preempted(self, request: Request) -> None:
        """vLLM is preempting a request, for whatever reason."""
        self._stale.add(request)

    def hold(self, jobs: Collection[Job]) -> None:
        requests = [self._request(job) for job in jobs]
        for request in requests:
            vllm_api.hold_for_one_step(self.scheduler, request)
        self._held_decodes = sum(not request.is_prefill_chunk for request in requests)

    def limit_prefills(self, limits: PrefillLimits) -> None:
        if limits.gated or limits.cap is not None:
            budget = self.decode_tokens() if limits.gated else None
            self._limits.lower(budget, limits.cap)

    def keep_seats_for(self, jobs: Collection[Job]) -> None:
        self._claims = [job.effective_level for job in jobs]
        self._claimed = {job.request_id for job in jobs}

    def admit_first(self, job: Job) -> None:
        self._first = job

    def may_take_seat(self, job: Job, popped: Request | None) -> bool:
        """Whether the head of a waiting queue may have a seat in this step. `popped`: what vLLM has
        taken out of the queue last."""
        loads = popped is not None and vllm_api.is_loading(popped)
        if not loads and not self._claims and self._first is None:
            return True
        if popped is not None and loads and popped.request_id not in self._claimed:
            # Its KV began to load in this step: vLLM gave it blocks, but not the seat yet.
            self._claimed.add(popped.request_id)
            self._claims.append(self.jobs[popped.request_id].effective_level)
        level, first = job.effective_level, self._first
        if first is not None and level > first.effective_level and first.seat is None:
            return False
        claims = sum(claim < level for claim in self._claims)
        return not claims or vllm_api.free_seats(self.scheduler) > claims

    def may_resume(self, job: Job, popped: Request | None) -> bool:
        """The same for the queue of requests that hold KV. False while all of them are loading or
        idle: vLLM would look at each one in every step."""
        return vllm_api.loaded(self.scheduler) > 0 and self.may_take_seat(job, popped)

    def is_skipped(self, request: Request) -> bool:
        """Whether vLLM cannot admit a waiting request in this step, whatever is free."""
        scheduler = self.scheduler
        if not vllm_api.is_ready(scheduler, request) or vllm_api.lacks_lookup(scheduler, request):
            return True
        if self._adapters is None:
            self._adapters = vllm_api.adapters_in_use(self.scheduler)
        return vllm_api.lacks_adapter(self.scheduler, request, self._adapters)

    def restore_limits(self) -> None:
        self._held_decodes = 0
        self._adapters = None
        for queue in self._queues:
            queue.end_step()
        self._claims, self._claimed, self._first = [], set(), None
        self._limits.restore()

    # Whose order applies (policy key `observe`): both changes between two steps, O(n log n)

    def take_over(self) -> None:
        """Order waiting and running requests by the policy."""
        scheduler, core = self.scheduler, self.core
        before = [*scheduler.waiting], [*scheduler.kv_holding_waiting]
        queues = [
            SemanticRequestQueue(core, self.jobs, queue, self.guard, gate, self.is_skipped)
            for queue, gate in (
                (core.waiting, self.may_take_seat),
                (core.with_kv, self.may_resume),
            )
        ]
        self._queues = queues
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
        core.hold({}, self.now())
        for queue in (core.waiting, core.with_kv):
            for job in list(queue):
                queue.remove(job)

        def arrival(request: Request) -> int:
            job = jobs.get(request.request_id)
            return -1 if job is None else job.sequence

        vllm_api.restore_queues(scheduler)
        self._queues = []
        self._stale.clear()
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
