"""vLLM's waiting queue, in the order of the policy core."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.requests.aside import Aside
from vllm_semantic_sched.engine.vllm_api import Request, RequestQueue
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, Rank
from vllm_semantic_sched.policy.order.waiting import WaitingQueue


class SemanticRequestQueue(RequestQueue):
    """Waiting requests by rank. If the core fails, the queue goes on first come, first served until
    it has been put into order again.

    vLLM peeks at the head, allocates for it and then pops, so `pop_request` always returns what
    `peek_request` returned last, even after a failure. A queue whose requests are all held back by
    a reservation is falsy, although its length is not 0. `queue`: the same in the core.
    """

    def __init__(
        self,
        core: SchedulingCore,
        jobs: dict[str, Job],
        queue: WaitingQueue,
        guard: Guard,
        may_take_seat: Callable[[Job, Request | None], bool],
        is_skipped: Callable[[Request], bool],
        aside: Aside,
    ) -> None:
        self._core = core
        self._jobs = jobs
        self._queue = queue
        self._guard = guard
        self._members: OrderedDict[str, Request] = OrderedDict()
        self._may_take_seat = may_take_seat
        self._is_skipped = is_skipped  # whether vLLM will put a request back in this step
        self._aside = aside
        self._lifted: dict[Request, tuple[Job, Rank]] = {}  # such requests
        self._ordered = True
        self._steps_in_disorder = 0
        self._peeked: Request | None = None
        self._popped: Request | None = None  # the last one that vLLM took out

    def add_request(self, request: Request) -> None:
        self._peeked = None
        self._members[request.request_id] = request
        if self._ordered:
            try:
                self._core.enqueue(self._jobs[request.request_id], self._queue)
                self._aside.add(request)
            except Exception:
                self._fall_back("queue_add")

    def prepend_request(self, request: Request) -> None:
        self.prepend_requests((request,))

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._peeked = None
        for request in requests:
            name = request.request_id
            self._members[name] = request
            self._members.move_to_end(name, last=False)
            if self._ordered:
                try:
                    job = self._jobs[name]
                    if (lifted := self._lifted.pop(request, None)) is not None:
                        self._core.put_back(*lifted, self._queue)
                        continue
                    if job not in self._queue:  # else the policy has ordered that it returns
                        self._core.requeue(job, self._queue)
                    self._aside.add(request)
                except Exception:
                    self._fall_back("queue_return")

    def begin_step(self) -> None:
        """A step begins: choose what is in the order."""
        if self._ordered:
            try:
                self._aside.begin_step()
            except Exception:
                self._fall_back("queue_aside")

    def end_step(self) -> None:
        """vLLM has filled a step: what was skipped is back. After a failure, put all into order
        again, in the first step, the second, the fourth and so on, or once the queue is empty."""
        self._popped = None
        for request in self._lifted:  # vLLM has admitted it all the same
            self._aside.remove(request, seated=True)
        self._lifted.clear()
        if self._ordered:
            self._steps_in_disorder = 0
            return
        self._steps_in_disorder += 1
        steps = self._steps_in_disorder
        if self._members and steps & (steps - 1):
            return
        try:
            for job in list(self._queue):
                self._queue.remove(job)
            self._aside.clear()
            for name, request in self._members.items():
                self._core.requeue(self._jobs[name], self._queue)
                self._aside.add(request)
            self._ordered = True
        except Exception:
            self._guard.failed("queue_order")

    def reposition(self, request: Request) -> None:
        """Move a request to its place after its rank has changed; no-op if it is not here."""
        if self._ordered and request.request_id in self._members:
            try:
                self._core.requeue(self._jobs[request.request_id], self._queue)
            except Exception:
                self._fall_back("queue_move")

    def peek_request(self) -> Request:
        if self._peeked is None:  # else it was found a moment ago, when vLLM asked for the truth
            self._peeked = self._head()
        if self._peeked is None:
            raise IndexError("peek from an empty queue")
        return self._peeked

    def pop_request(self) -> Request:
        request = self._peeked or self._head()
        assert request is not None, "pop from an empty queue"
        if not self._lift(request):
            self.remove_request(request, seated=True)
        self._popped = request
        return request

    def _lift(self, request: Request) -> bool:
        """Take out a request that vLLM is about to put back; False if it may start."""
        name = request.request_id
        if not self._ordered:
            return False
        try:
            if not self._is_skipped(request):
                return False
            job = self._jobs[name]
            rank = self._core.skip(job, self._queue)
        except Exception:
            self._fall_back("queue_skip")
            return False
        if rank is None:
            return False
        self._peeked = None
        del self._members[name]
        self._lifted[request] = job, rank
        return True

    def remove_request(self, request: Request, seated: bool = False) -> None:
        self._peeked = None
        # vLLM passes the same list to every queue, so some requests are not in this one.
        if self._members.pop(request.request_id, None) is None or not self._ordered:
            return
        try:
            self._aside.remove(request, seated)
            job = self._jobs.get(request.request_id)
            if job is None:  # it has ended, and the core has removed it
                return
            if seated:
                self._core.take(job, self._queue)
            else:
                self._queue.remove(job)
        except Exception:
            self._fall_back("queue_remove")

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        """Whether a request may be seated now. vLLM checks this before it looks at the head, so
        it admits only requests that reservations let through."""
        self._peeked = head = self._head() if self._members else None
        if head is None or not self._ordered:
            return head is not None
        try:  # not `with`: vLLM asks for every request that it skips
            return self._may_take_seat(self._jobs[head.request_id], self._popped)
        except Exception:
            self._guard.failed("kept_seats")
            return True

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        if self._ordered:
            try:
                ordered = {job.request_id: None for job in self._queue.ordered()}
                if len(ordered) < len(self._members):  # others are aside
                    ordered |= dict.fromkeys(self._members)
                return iter([self._members[name] for name in ordered])
            except Exception:
                self._fall_back("queue_list")
        return iter(list(self._members.values()))

    def _head(self) -> Request | None:
        if self._members and self._ordered:
            try:
                job = self._queue.peek()
                if job is not None:
                    return self._members[job.request_id]
                assert len(self._queue) == len(self._members), "the core lost a request"
                return None
            except Exception:
                self._fall_back("queue_next")
        return next(iter(self._members.values()), None)

    def _fall_back(self, doing: str) -> None:
        """First come, first served, until `end_step` has put the queue into order again."""
        self._guard.failed(doing)
        self._ordered = False
