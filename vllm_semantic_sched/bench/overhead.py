"""Time of a scheduling step with many waiting requests.

The schedulers are vLLM's real ones with a simulated KV cache: no weights, no GPU. All schedulers
and sizes are built first and then stepped in turn, so that other programs disturb all of them
alike. Times are CPU time of the thread: a step waits for nothing, so this is what it takes on an
idle machine.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_semantic_sched.bench.client import Progress

ALL_FEATURES = Path(__file__).with_name("all_features.yaml")
"""A policy with every feature that costs time in a step."""
PARTS = ("schedule", "update", "arrival")
"""What is timed: `schedule()`, `update_from_output()`, `add_request()`."""

_WARM_UP_STEPS = 20
_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 4064

StepTimes = dict[str, dict[str, float]]
"""p50 and p99 in microseconds of CPU time, by part."""


class SaturatedScheduler:
    """A scheduler without a model: `running` requests decode and `waiting` ones queue for a seat.

    Every request has an urgency hint: the predictor would run in another process.

    Args:
        policy: of SemanticScheduler, by name or path; None for vLLM's own scheduler.
        tenants: number of tenants, which send in turn.

    Raises:
        RuntimeError: the scheduler does not run exactly `running` requests.
    """

    def __init__(self, policy: str | None, running: int, waiting: int, tenants: int = 1) -> None:
        # Imports vLLM: the schedulers are built when they are needed, not when the command starts.
        from vllm_semantic_sched import SemanticScheduler
        from vllm_semantic_sched.bench import standalone

        self._standalone = standalone
        self._random = random.Random(0)
        self._count = 0
        self._tenants = tenants
        # Enough blocks for every seat to reach its full length: preemption for lack of blocks
        # would add the cost of recomputing to the measurement.
        blocks_per_seat = (_PROMPT_TOKENS + _OUTPUT_TOKENS) // standalone.BLOCK_SIZE + 1
        shape: dict[str, Any] = {"max_num_seqs": running, "num_blocks": running * blocks_per_seat}
        if policy is not None:
            shape |= {"scheduler_class": SemanticScheduler, "semantic_sched": {"policy": policy}}
        self.scheduler = standalone.build_scheduler(**shape)
        for _ in range(running):
            # The most urgent, so that no waiting request can take a seat.
            self.scheduler.add_request(self.new_request(level=0))
        for _ in range(running):
            step = self.scheduler.schedule()
            self.scheduler.update_from_output(step, self.model_output(step))
            if len(step.num_scheduled_tokens) == running == step.total_num_scheduled_tokens:
                break
        for _ in range(waiting):
            self.scheduler.add_request(self.new_request())
        counts = tuple(self.scheduler.get_request_counts())
        if counts != (running, waiting):
            raise RuntimeError(f"expected {running} running, {waiting} waiting, got {counts}")

    def new_request(self, level: int | None = None) -> Any:
        """Make a request without adding it; by default at a random level from 1 to 4."""
        self._count += 1
        return self._standalone.make_request(
            f"r{self._count}",
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=_OUTPUT_TOKENS,
            urgency=self._random.randint(1, 4) if level is None else level,
            tenant=f"tenant {self._count % self._tenants}",
        )

    def model_output(self, step: Any, finish_one: bool = False) -> Any:
        """Return a model's output for a step; with `finish_one`, the last token of one request."""
        if finish_one and step.num_scheduled_tokens:
            chosen = self._random.choice(list(step.num_scheduled_tokens))
            request = self.scheduler.requests[chosen]
            request.max_tokens = request.num_output_tokens + 1
        return self._standalone.model_output(self.scheduler, step)


def measure(
    policies: Mapping[str, str | None],
    sizes: Sequence[int],
    running: int,
    tenants: int,
    steps: int,
    arrivals: int,
    finish_every: int,
    progress: Progress,
) -> dict[tuple[str, int], StepTimes]:
    """Time the parts of a step by scheduler and number of waiting requests.

    Args:
        policies: by the scheduler's name; None for vLLM's own scheduler.
        sizes: numbers of waiting requests.
        running, tenants: numbers of decoding requests and of tenants.
        steps: timed steps.
        arrivals: new requests per step.
        finish_every: steps per finished request.
    """
    loaded: dict[tuple[str, int], SaturatedScheduler] = {}
    with progress.bar("filling the queues", len(sizes) * len(policies)) as advance:
        for size in sizes:
            for name, policy in policies.items():
                loaded[name, size] = SaturatedScheduler(policy, running, size, tenants)
                advance()
    seconds: dict[tuple[str, int], dict[str, list[float]]] = {
        case: {part: [] for part in PARTS} for case in loaded
    }
    # As vLLM's engine does after start: otherwise a collection would visit every request.
    gc.collect()
    gc.freeze()
    try:
        with progress.bar("stepping", steps + _WARM_UP_STEPS) as advance:
            for step in range(steps + _WARM_UP_STEPS):
                for case, scheduler in loaded.items():
                    for part, value in _time_step(scheduler, arrivals, step % finish_every == 0):
                        if step >= _WARM_UP_STEPS:
                            seconds[case][part].append(value)
                advance()
    finally:
        gc.unfreeze()
    return {
        (name, size): {part: _percentiles(seconds[name, size][part]) for part in PARTS}
        for name in policies
        for size in sizes
    }


def _time_step(
    loaded: SaturatedScheduler, arrivals: int, finish: bool
) -> Iterator[tuple[str, float]]:
    requests = [loaded.new_request() for _ in range(arrivals)]
    start = time.thread_time()
    for request in requests:
        loaded.scheduler.add_request(request)
    yield "arrival", (time.thread_time() - start) / max(1, arrivals)
    start = time.thread_time()
    output = loaded.scheduler.schedule()
    yield "schedule", time.thread_time() - start
    answer = loaded.model_output(output, finish_one=finish)
    start = time.thread_time()
    loaded.scheduler.update_from_output(output, answer)
    yield "update", time.thread_time() - start


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    import numpy as np

    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
