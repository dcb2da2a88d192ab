"""Runs the steps of vLLM's scheduler, and says what each request got and when."""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Protocol

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.lab.bench.standalone import make_request, model_output


class Device(Protocol):
    def add(self, *requests: Request) -> None: ...
    def schedule(self) -> SchedulerOutput: ...
    def execute(self) -> Any: ...


class SimulatedDevice:
    """Executes steps in order with simulated model output."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._queue: deque = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        self._queue.append((step, model_output(self.scheduler, step)))
        return step

    def execute(self) -> None:
        self.scheduler.update_from_output(*self._queue.popleft())


class EngineSteps:
    """The steps of a scheduler, numbered from 0. An asynchronous one is a step ahead of its device.

    Attributes:
        scheduled: tokens by request id, of each step.
        first: number of the step in which a request first got tokens, by request id.
        ended: number of the first step after which a request was gone, by request id.
    """

    def __init__(self, scheduler: Any, device: Device | None = None) -> None:
        self.scheduler = scheduler
        self.device = SimulatedDevice(scheduler) if device is None else device
        self.requests: dict[str, Request] = {}
        self.scheduled: list[dict[str, int]] = []
        self.first: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self._ahead = int(scheduler.vllm_config.scheduler_config.async_scheduling)
        self._in_flight = 0

    @property
    def count(self) -> int:
        """Steps so far: the number of the next one."""
        return len(self.scheduled)

    def add(self, *names: str, **fields: Any) -> None:
        """Add requests, see `make_request`."""
        self.add_requests(*(make_request(name, **fields) for name in names))

    def add_requests(self, *requests: Request) -> None:
        for request in requests:
            self.requests.setdefault(request.request_id, request)
        self.device.add(*requests)

    def run(self, steps: int = 1) -> dict[str, int]:
        """Run steps; the tokens of the last."""
        for _ in range(steps):
            tokens = dict(self.device.schedule().num_scheduled_tokens)
            for name in tokens:
                self.first.setdefault(name, self.count)
            self._in_flight += 1
            if self._in_flight > self._ahead:
                self._in_flight -= 1
                self.device.execute()
            for name in self.requests:
                if name not in self.scheduler.requests:
                    self.ended.setdefault(name, self.count)
            self.scheduled.append(tokens)
        return self.scheduled[-1]

    def finish(self, limit: int = 2000) -> None:
        """Run until all requests have ended."""
        for _ in range(limit):
            if not self.scheduler.requests:
                return
            self.run()
        raise AssertionError(f"left after {limit} steps: {sorted(self.scheduler.requests)}")

    def until_scheduled(self, name: str, limit: int) -> int | None:
        """Run until a request gets tokens; the steps before that, None if more than `limit`."""
        begin = self.count
        while name not in self.first and self.count <= begin + limit:
            self.run()
        return self.first[name] - begin if name in self.first else None

    def without(self, names: Iterable[str], begin: int = 0) -> int:
        """The longest run of steps, from number `begin`, in which none of these got tokens."""
        longest = now = 0
        wanted = set(names)
        for tokens in self.scheduled[begin:]:
            now = 0 if wanted & tokens.keys() else now + 1
            longest = max(longest, now)
        return longest

    def longest_empty(self) -> int:
        """The longest run of steps in which nothing was scheduled."""
        longest = now = 0
        for tokens in self.scheduled:
            now = 0 if tokens else now + 1
            longest = max(longest, now)
        return longest


def awaiting_grammar(name: str, grammar: object = None, **fields: Any) -> Request:
    """A request with structured output; `grammar`: None while it is compiled, an exception if that
    failed."""
    request = make_request(name, **fields)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=grammar)
    return request


def image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """An image at such a place of a prompt, in tokens."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)


def calls_in(function: Callable[[], Any]) -> int:
    """Calls of functions, Python's and C's, while this one runs: its cost on any machine."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
