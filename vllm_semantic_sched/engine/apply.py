"""Carries out what a step has ordered: the only code that touches vLLM's lists and limits."""

import bisect
from collections.abc import Callable, Collection, Iterable

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.requests.aside import Aside
from vllm_semantic_sched.engine.requests.endings import Endings
from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.engine.vllm_api import Request, Scheduler
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.orders import NO_LIMITS, End, Orders, PrefillLimits, Victim
from vllm_semantic_sched.policy.overload.refusal import DROPPED
from vllm_semantic_sched.policy.retention import PreemptionKind

# More requests than that are put into order by sorting all.
_FEW = 4

# Steps for which a seat is kept for a request that returns. A copy from the host takes fewer; KV
# from elsewhere can take hundreds, and the seat is worth more to others meanwhile.
_KEPT = 16


class SeatGate:
    """Keeps seats for some requests while vLLM fills a step."""

    def __init__(self, scheduler: Scheduler, jobs: dict[str, Job]) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._claims: list[float] = []  # levels of the requests that a seat is kept for
        self._claimed: set[str] = set()  # their ids
        self._first: Job | None = None  # no less urgent request gets a seat before it
        self._adapters: set[int] | None = None  # in use, and of requests that start in this step
        self._stale: set[Request] = set()  # preempted with output in flight
        self._since: dict[Request, int] = {}  # returning requests, by the first step of that

    def keep(self, returning: Collection[Job], first: Job | None) -> None:
        """Keep seats in the coming step: see `Orders.keep_seats_for` and `Orders.first`."""
        self._claims = [job.effective_level for job in returning]
        self._claimed = {job.request_id for job in returning}
        self._first = first

    def end_step(self) -> None:
        """The step is filled."""
        self._claims, self._claimed, self._first = [], set(), None
        self._adapters = None

    def preempted(self, request: Request) -> None:
        """vLLM is preempting a request, for whatever reason."""
        self._stale.add(request)

    def forget_preempted(self) -> None:
        """Keep no seats for preempted requests: vLLM is about to order them by itself."""
        self._stale.clear()

    def returning(self, any_with_kv: bool) -> list[Job]:
        """Requests without a seat that vLLM will be able to seat soon and cannot now, as long as
        that is worth a seat. Call it once a step. `any_with_kv`: whether any has KV."""
        scheduler = self._scheduler
        if self._stale:
            self._stale = {
                request for request in self._stale if vllm_api.is_stale(scheduler, request)
            }
        loading = vllm_api.loading(scheduler) if any_with_kv else ()
        if not self._stale and not loading:
            self._since.clear()
            return []
        step, since = scheduler.current_step, self._since
        self._since = {request: since.get(request, step) for request in (*self._stale, *loading)}
        return [
            self._jobs[request.request_id]
            for request, begun in self._since.items()
            if step < begun + _KEPT and request.request_id in self._jobs
        ]

    def may_take_seat(self, job: Job, popped: Request | None) -> bool:
        """Whether the head of a waiting queue may have a seat in this step. `popped`: what vLLM has
        taken out of the queue last."""
        if vllm_api.is_unannounced(self._scheduler, job.request_id):
            return False
        loads = popped is not None and vllm_api.is_loading(popped)
        if not loads and not self._claims and self._first is None:
            return True
        if popped is not None and loads and popped.request_id not in self._claimed:
            # Its KV began to load in this step: vLLM gave it blocks, but not the seat yet.
            self._claimed.add(popped.request_id)
            self._claims.append(self._jobs[popped.request_id].effective_level)
        level, first = job.effective_level, self._first
        if first is not None and level > first.effective_level and first.seat is None:
            return False
        claims = sum(claim < level for claim in self._claims)
        return not claims or vllm_api.free_seats(self._scheduler) > claims

    def may_resume(self, job: Job, popped: Request | None) -> bool:
        """The same for the queue of requests that hold KV. False while all of them are loading or
        idle: vLLM would look at each one in every step."""
        return vllm_api.loaded(self._scheduler) > 0 and self.may_take_seat(job, popped)

    def is_skipped(self, request: Request) -> bool:
        """Whether vLLM cannot admit a waiting request in this step, whatever is free."""
        scheduler = self._scheduler
        if not vllm_api.is_ready(scheduler, request) or vllm_api.lacks_lookup(scheduler, request):
            return True
        if self._adapters is None:
            self._adapters = vllm_api.adapters_in_use(scheduler)
        if vllm_api.lacks_adapter(scheduler, request, self._adapters):
            return True
        if (adapter := vllm_api.adapter_of(request)) is not None:
            self._adapters.add(adapter)  # it starts
        return False


class Applier:
    """Applies orders to vLLM's scheduler. What has become impossible since they were given, because
    a request has ended with another answer to its prompt, is left out."""

    def __init__(
        self,
        scheduler: Scheduler,
        core: SchedulingCore,
        jobs: dict[str, Job],
        guard: Guard,
        preemptions: Preemptions,
        endings: Endings,
        now: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._jobs = jobs
        self._guard = guard
        self._preemptions = preemptions
        self._endings = endings
        self._now = now
        self._limits = vllm_api.StepLimits(scheduler)
        self._queues: list[SemanticRequestQueue] = []
        self.gate = SeatGate(scheduler, jobs)

    def begin_step(self) -> None:
        """Before a step is decided: bring the queues up to date with vLLM."""
        for queue in self._queues:
            queue.begin_step()

    def apply(self, orders: Orders) -> None:
        """Carry out what a step has ordered."""
        guard = self._guard
        for end in orders.end:
            with guard("endings"):
                self.end(end)
        for victim in orders.preempt:
            with guard("preemption"):
                self._preempt(victim)
        for session in orders.release:
            with guard("preemption"):
                if session.request_id in self._scheduler.requests:
                    self._preemptions.release(self._request(session))
        if orders.moved:
            with guard("running_order"):
                self._place_again(orders.moved)
        if orders.keep_seats_for or orders.first is not None:
            with guard("kept_seats"):
                self.gate.keep(orders.keep_seats_for, orders.first)
        if orders.hold:
            with guard("holds"):
                self._hold(orders.hold)
        if orders.prefills is not NO_LIMITS:
            with guard("prefill_limits"):
                self._limit_prefills(orders.prefills, orders.hold)
        if orders.protected_prefill:
            with guard("prefill_limits"):
                vllm_api.let_prefills_run(self._scheduler)

    def end(self, end: End) -> None:
        """End a request that the policy has ended."""
        self._endings.refuse_prompt(end.job, end.refusal)

    def insert(self, request: Request) -> None:
        """Put a request that has a seat into vLLM's list of running ones, in order of rank."""
        running = self._scheduler.running
        place = len(running)  # whatever fails, the request must not get lost
        with self._guard("running_order"):
            place = bisect.bisect(running, self._order(request), key=self._order)
        running.insert(place, request)

    def restore_limits(self) -> None:
        """vLLM has filled the step: what was lowered for it is back."""
        for queue in self._queues:
            queue.end_step()
        self.gate.end_step()
        self._limits.restore()

    def _preempt(self, victim: Victim) -> None:
        request = self._scheduler.requests.get(victim.job.request_id)
        if request is None:
            return
        try:
            self._preemptions.evict(request, victim)
        finally:
            if request in self._scheduler.running:  # it failed: the job has its seat again
                self._core.waiting.remove(victim.job)
                self._core.start(victim.job)
        if victim.plan.kind is PreemptionKind.DROP:
            self.end(End(victim.job, DROPPED))

    def _place_again(self, jobs: Iterable[Job]) -> None:
        running = self._scheduler.running
        moved = {
            self._request(job): None
            for job in jobs
            if job.state is JobState.RUNNING and job.request_id in self._scheduler.requests
        }
        if len(moved) > _FEW:
            running.sort(key=self._order)
            return
        # All out before the first goes in again: a place is found among those that are in order.
        out = []
        for request in moved:
            with self._guard("running_order"):
                running.remove(request)
                out.append(request)
        for request in out:
            self.insert(request)

    def _hold(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            vllm_api.hold_for_one_step(self._scheduler, self._request(job))

    def _limit_prefills(self, limits: PrefillLimits, held: Iterable[Job]) -> None:
        if not limits.gated and limits.cap is None:
            return
        budget = None
        if limits.gated:
            scheduler = self._scheduler
            held_decodes = sum(not self._request(job).is_prefill_chunk for job in held)
            prefills = len(vllm_api.running_prefills(scheduler))
            decoding = len(scheduler.running) - prefills - held_decodes
            budget = decoding * (1 + scheduler.num_spec_tokens)
        self._limits.lower(budget, limits.cap)

    # Whose order applies (policy key `observe`): both changes between two steps, O(n log n)

    def take_over(self, observe: Callable[[Job], None]) -> None:
        """Order waiting and running requests by the policy. `observe` brings the tokens of a
        running one up to date."""
        scheduler, core, gate = self._scheduler, self._core, self.gate
        before = [*scheduler.waiting], [*scheduler.kv_holding_waiting]
        queues = [
            SemanticRequestQueue(
                core,
                self._jobs,
                queue,
                self._guard,
                may_start,
                gate.is_skipped,
                Aside(scheduler, core, self._jobs, queue),
            )
            for queue, may_start in (
                (core.waiting, gate.may_take_seat),
                (core.with_kv, gate.may_resume),
            )
        ]
        self._queues = queues
        # The tail of self.running, where vLLM takes its victims, is the least urgent request.
        vllm_api.replace_queues(scheduler, *queues)
        for queue, requests in zip(queues, before, strict=True):
            for request in requests:
                queue.add_request(request)
        with self._guard("running_order"):
            core.rank_running(observe)
            scheduler.running.sort(key=self._order)

    def hand_back(self) -> None:
        """Give vLLM its own queues again, with all requests in order of arrival."""
        scheduler, core, jobs = self._scheduler, self._core, self._jobs
        waiting, holding = list(scheduler.waiting), list(scheduler.kv_holding_waiting)
        core.hold({}, self._now())
        for queue in (core.waiting, core.with_kv):
            for job in list(queue):
                queue.remove(job)

        def arrival(request: Request) -> int:
            job = jobs.get(request.request_id)
            return -1 if job is None else job.sequence

        vllm_api.restore_queues(scheduler)
        self._queues = []
        self.gate.forget_preempted()
        for request in sorted(waiting, key=arrival):
            scheduler.waiting.add_request(request)
        for request in sorted(holding, key=arrival):
            scheduler.kv_holding_waiting.add_request(request)
        scheduler.running.sort(key=arrival)

    def _order(self, request: Request) -> tuple[float, float, int]:
        return self._core.running.order(self._jobs[request.request_id])

    def _request(self, job: Job) -> Request:
        return self._scheduler.requests[job.request_id]
