"""Keeps waiting requests that cannot start out of the order: a step does not look at each of them,
and they hide no request behind them that could start."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.vllm_api import Request, Scheduler
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.waiting import WaitingQueue

# Pending requests asked in a step in which no seat is free, in turn: such a step of vLLM's looks at
# no waiting request at all.
_ASKED_WITHOUT_A_SEAT = 100


class Aside:
    """Chooses which requests of a waiting queue stay out of its order: those that vLLM cannot admit
    yet (`vllm_api.is_pending`), and of each LoRA adapter that no running request uses all but the
    first, which is enough to ask for a slot."""

    def __init__(
        self, scheduler: Scheduler, core: SchedulingCore, jobs: dict[str, Job], queue: WaitingQueue
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._jobs = jobs
        self._queue = queue
        self._pending: OrderedDict[Request, None] = OrderedDict()  # the next one to ask comes first
        self._of_adapter: dict[int, dict[Request, None]] = {}
        self._first: dict[int, Request] = {}  # by adapter, where others are aside
        self._new: dict[int, list[Request]] = {}  # by adapter, not compared with the first yet

    def add(self, request: Request) -> None:
        """Take in a request that has been queued."""
        if vllm_api.is_pending(self._scheduler, request):
            self._pending[request] = None
            self._set_aside(request)
        adapter = vllm_api.adapter_of(request)
        if adapter is not None:
            self._of_adapter.setdefault(adapter, {})[request] = None
            self._new.setdefault(adapter, []).append(request)

    def remove(self, request: Request, seated: bool) -> None:
        """Forget a request that has left the queue. `seated`: to run, so that its adapter has a
        slot."""
        self._pending.pop(request, None)
        adapter = vllm_api.adapter_of(request)
        users = None if adapter is None else self._of_adapter.get(adapter)
        if adapter is None or users is None:
            return
        users.pop(request, None)
        if seated:
            self._recall_all(adapter)
        elif self._first.get(adapter) is request:
            del self._first[adapter]  # `begin_step` finds the next one
        if not users:
            del self._of_adapter[adapter]
            self._new.pop(adapter, None)

    def clear(self) -> None:
        """Forget all requests: the queue is about to be filled again."""
        for requests in (self._pending, self._of_adapter, self._first, self._new):
            requests.clear()

    def begin_step(self) -> None:
        """Recall the requests that could be admitted now, and set aside others."""
        if self._pending:
            for request in self._ready():
                self._recall(request)
        if not self._of_adapter:
            return
        in_use = vllm_api.adapters_in_use(self._scheduler)
        for adapter, requests in self._of_adapter.items():
            new = self._new.pop(adapter, ())
            first = self._first.get(adapter)
            if adapter in in_use:
                self._recall_all(adapter)
            elif first is None:
                self._elect(adapter, requests)
            elif new:
                self._elect(adapter, (first, *new))

    def _ready(self) -> Iterable[Request]:
        """Requests that are no longer pending, among those whose turn it is to be asked."""
        scheduler, pending = self._scheduler, self._pending
        count = len(pending)
        if vllm_api.free_seats(scheduler) <= 0:
            count = min(count, _ASKED_WITHOUT_A_SEAT)
        asked = list(itertools.islice(pending, count))
        if count < len(pending):
            for request in asked:
                pending.move_to_end(request)
        return [request for request in asked if not vllm_api.is_pending(scheduler, request)]

    def _recall(self, request: Request) -> None:
        """A request could be admitted; it may still have to wait for a slot."""
        del self._pending[request]
        self._core.recall(self._jobs[request.request_id], self._queue)
        adapter = vllm_api.adapter_of(request)
        if adapter is not None:
            self._new.setdefault(adapter, []).append(request)

    def _recall_all(self, adapter: int) -> None:
        """Requests of an adapter that has a slot are all in the order."""
        if self._first.pop(adapter, None) is not None:
            for request in self._of_adapter[adapter]:
                if request not in self._pending:
                    self._core.recall(self._jobs[request.request_id], self._queue)

    def _elect(self, adapter: int, requests: Iterable[Request]) -> None:
        """Leave the best of these requests in the order. Those without a prediction stay, too: they
        have no rank yet."""
        users = self._of_adapter[adapter]
        ranked = []
        for request in requests:
            if request in users and request not in self._pending:
                job = self._jobs[request.request_id]
                rank = self._queue.rank_of(job)
                if rank is not None:
                    ranked.append((rank, job, request))
        if not ranked:
            self._first.pop(adapter, None)
            return
        best = min(ranked, key=lambda entry: entry[0])
        self._first[adapter] = best[2]
        for entry in ranked:
            if entry is best:
                self._core.recall(entry[1], self._queue)
            else:
                self._set_aside(entry[2])

    def _set_aside(self, request: Request) -> None:
        self._core.set_aside(self._jobs[request.request_id], self._queue)
