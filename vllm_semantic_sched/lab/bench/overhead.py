"""Time of a scheduling step and of an arrival with many waiting requests; speed of the simulator.

The schedulers are vLLM's real ones with a simulated KV cache, built first and then stepped in turn:
other programs disturb them alike. Times are CPU time: a step waits for nothing.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.client import Progress

SCENARIO = "speed"
"""The scenario of the simulator that is measured by default."""
ALL_FEATURES = Path(__file__).with_name("all_features.yaml")
"""A policy with every feature that costs time in a step."""
PARTS = ("schedule", "update", "arrival", "prepare")
"""What is timed: `schedule()`, `update_from_output()`, `add_request()`, and what happens to a new
request on vLLM's input thread before that."""
URGENT_PARTS = ("preempts", "beside")
"""What is timed: the `schedule()` that preempts for an urgent request, and the one after it."""
ARRIVALS = 2  # new requests per step

_FINISH_EVERY = 8  # steps per finished request
_TENANTS = 100  # they send in turn
_WARM_UP_STEPS = 20
_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 4064

StepTimes = dict[str, dict[str, float]]
"""p50 and p99 in microseconds of CPU time, by part."""


class Case(NamedTuple):
    """A policy of SemanticScheduler by name or path (None: vLLM's own scheduler). With `text`,
    arrivals have no hint and are read; a stub answers in place of the predictor's process."""

    policy: str | None
    text: bool = False


class SaturatedScheduler:
    """A scheduler without a model: `running` requests decode and `waiting` ones queue for a seat.
    By default the running ones have the most urgent `level`, so that none is preempted."""

    def __init__(self, case: Case, running: int, waiting: int, level: int = 0) -> None:
        # Imports vLLM: the schedulers are built when they are needed, not when the command starts.
        from vllm_semantic_sched import SemanticScheduler
        from vllm_semantic_sched.lab.bench import standalone

        self._standalone = standalone
        self.random = random.Random(0)
        self._numbers = itertools.count(1)
        # Enough blocks for every seat to reach its full length: preemption for lack of blocks
        # would add the cost of recomputing to the measurement.
        blocks_per_seat = (_PROMPT_TOKENS + _OUTPUT_TOKENS) // standalone.BLOCK_SIZE + 1
        ours: dict[str, Any] = {}
        if case.policy is not None:
            ours = {"scheduler_class": SemanticScheduler, "semantic_sched": {"policy": case.policy}}
        self.scheduler = standalone.build_scheduler(
            max_num_seqs=running, num_blocks=running * blocks_per_seat, **ours
        )
        if case.text:
            standalone.read_texts(self.scheduler)
        self._text = case.text
        for _ in range(running):
            self.arrive(self.new_request(level))
        for _ in range(running):
            step = self.scheduler.schedule()
            self.scheduler.update_from_output(step, self.model_output(step))
            if len(step.num_scheduled_tokens) == running == step.total_num_scheduled_tokens:
                break
        for _ in range(waiting):
            self.arrive(self.new_request(self.random.randint(level + 1, 4)))
        counts = tuple(self.scheduler.get_request_counts())
        if counts != (running, waiting):
            raise RuntimeError(f"expected {running} running, {waiting} waiting, got {counts}")

    def new_request(self, level: int | None = None) -> Any:
        """Make a request without adding it; by default at a random level from 1 to 4, or at none if
        texts are read."""
        number = next(self._numbers)
        if level is None and not self._text:
            level = self.random.randint(1, 4)
        tenant = f"tenant {number % _TENANTS}"
        return self._standalone.make_request(
            f"r{number}", _PROMPT_TOKENS, _OUTPUT_TOKENS, level, tenant=tenant
        )

    def prepare(self, request: Any) -> None:
        """Do what vLLM's input thread does with a new request once it is built."""
        if hasattr(self.scheduler, "arrivals"):
            self.scheduler.arrivals.prepare(request)

    def arrive(self, request: Any) -> None:
        """Prepare a request and add it, as vLLM's input thread and engine do."""
        self.prepare(request)
        self.scheduler.add_request(request)

    def model_output(self, step: Any, finish: str | None = None) -> Any:
        """A model's output that ends the request `finish`, if one is named."""
        if finish is not None:
            request = self.scheduler.requests[finish]
            request.max_tokens = request.num_output_tokens + 1
        return self._standalone.model_output(self.scheduler, step)


def measure(
    cases: Mapping[str, Case], sizes: Sequence[int], running: int, steps: int, progress: Progress
) -> dict[tuple[str, int], StepTimes]:
    """Time the parts of so many steps by case and number of waiting requests (`sizes`)."""
    loaded: dict[tuple[str, int], SaturatedScheduler] = {}
    with progress.bar("filling the queues", len(sizes) * len(cases)) as advance:
        for size, (name, case) in itertools.product(sizes, cases.items()):
            loaded[name, size] = SaturatedScheduler(case, running, size)
            advance()
    seconds = {key: {part: list[float]() for part in PARTS} for key in loaded}
    # As vLLM's engine does after start: otherwise a collection would visit every request.
    gc.collect()
    gc.freeze()
    try:
        with progress.bar("stepping", steps + _WARM_UP_STEPS) as advance:
            for step in range(steps + _WARM_UP_STEPS):
                for key, scheduler in loaded.items():
                    for part, value in _time_step(scheduler, step % _FINISH_EVERY == 0):
                        if step >= _WARM_UP_STEPS:
                            seconds[key][part].append(value)
                advance()
    finally:
        gc.unfreeze()
    return {key: _percentiles(seconds[key]) for key in itertools.product(cases, sizes)}


def measure_urgent(policy: str, running: int, waiting: int, rounds: int) -> StepTimes:
    """Time `URGENT_PARTS` around urgent requests that preempt running ones of level 1."""
    loaded = SaturatedScheduler(Case(policy), running, waiting, level=1)
    seconds = {part: list[float]() for part in URGENT_PARTS}
    for _ in range(rounds):
        urgent = loaded.new_request(level=0)
        loaded.arrive(urgent)
        for part in (*URGENT_PARTS, None):  # in the last step the preempted request returns
            start = time.thread_time()
            step = loaded.scheduler.schedule()
            if part is not None:
                seconds[part].append(time.thread_time() - start)
            ends = urgent.request_id if part == "beside" else None
            output = loaded.model_output(step, finish=ends)
            loaded.scheduler.update_from_output(step, output)
    return _percentiles(seconds)


def _time_step(loaded: SaturatedScheduler, finish: bool) -> Iterator[tuple[str, float]]:
    requests = [loaded.new_request() for _ in range(ARRIVALS)]
    for part, act in (("prepare", loaded.prepare), ("arrival", loaded.scheduler.add_request)):
        start = time.thread_time()
        for request in requests:
            act(request)
        yield part, (time.thread_time() - start) / ARRIVALS
    start = time.thread_time()
    output = loaded.scheduler.schedule()
    yield "schedule", time.thread_time() - start
    scheduled = list(output.num_scheduled_tokens)
    ends = loaded.random.choice(scheduled) if finish and scheduled else None
    answer = loaded.model_output(output, ends)
    start = time.thread_time()
    loaded.scheduler.update_from_output(output, answer)
    yield "update", time.thread_time() - start


def _percentiles(seconds: Mapping[str, Sequence[float]]) -> StepTimes:
    import numpy as np

    return {
        part: {f"p{n}": float(np.percentile(np.array(values) * 1e6, n)) for n in (50, 99)}
        for part, values in seconds.items()
    }


@dataclass(frozen=True, slots=True)
class Speed:
    """One simulation: CPU seconds, engine steps, and the peak memory of its process."""

    requests: int
    seconds: float
    steps: int
    mebibytes: float

    @property
    def microseconds(self) -> float:
        """CPU time per request."""
        return self.seconds / self.requests * 1e6


def measure_simulator(sizes: Sequence[int], scenario: str = SCENARIO) -> list[Speed]:
    """Simulate `scenario` at each size, each in a new process with its own peak memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(_simulate_one, (size, scenario)) for size in sizes]


def _simulate_one(requests: int, name: str) -> Speed:
    from vllm_semantic_sched.sim.metrics import Recorder
    from vllm_semantic_sched.sim.scenario import load_scenarios
    from vllm_semantic_sched.sim.simulation import simulate

    scenario = load_scenarios(name, {"workload.requests": requests})[0]
    scheduler = next(iter(scenario.policies))
    recorder = Recorder(scenario.slos(scheduler))
    start = time.process_time()
    steps = simulate(scenario, scheduler, finished=recorder.add).steps
    recorder.levels()
    seconds = time.process_time() - start
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux starts ru_maxrss from the parent's value, so read the peak of this process.
    status = Path("/proc/self/status")
    if status.is_file():
        kibibytes = int(status.read_text().partition("VmHWM:")[2].split()[0])
    return Speed(requests, seconds, steps, kibibytes / 1024)
