"""A scheduler whose seats are all taken, with any number of requests waiting."""

from __future__ import annotations

import random

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.bench.fake_engine import (
    BLOCK_SIZE,
    build_scheduler,
    make_request,
    model_output,
)

_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 4064
# Enough for every seat to reach its full length: preemption for want of blocks would mix the
# cost of recomputing into the measurement.
_BLOCKS_PER_SEAT = (_PROMPT_TOKENS + _OUTPUT_TOKENS) // BLOCK_SIZE + 1


class Crowd:
    """`running` decoding requests and `waiting` ones behind them, on a scheduler without a model.

    Every request has an urgency hint: measured is the scheduler, while a predictor works beside
    it in a process of its own.

    Args:
        policy: of SemanticScheduler, by name or path; None for vLLM's own scheduler.
        tenants: how many take turns in asking.

    Raises:
        RuntimeError: the scheduler did not run exactly `running` requests.
    """

    def __init__(self, policy: str | None, running: int, waiting: int, tenants: int = 1) -> None:
        self._random = random.Random(0)
        self._count = 0
        self._tenants = tenants
        self.scheduler = build_scheduler(
            Scheduler if policy is None else SemanticScheduler,
            max_num_seqs=running,
            num_blocks=running * _BLOCKS_PER_SEAT,
            semantic_sched=None if policy is None else {"policy": policy},
        )
        for _ in range(running):
            # The most urgent: what waits must not be able to take a seat.
            self.scheduler.add_request(self.new_request(level=0))
        for _ in range(running):
            step = self.scheduler.schedule()
            self.scheduler.update_from_output(step, self.answer(step))
            if len(step.num_scheduled_tokens) == running == step.total_num_scheduled_tokens:
                break
        for _ in range(waiting):
            self.scheduler.add_request(self.new_request())
        counts = tuple(self.scheduler.get_request_counts())
        if counts != (running, waiting):
            raise RuntimeError(f"expected {running} running, {waiting} waiting, got {counts}")

    def new_request(self, level: int | None = None) -> Request:
        """A request that has not been added; by default at a random level below the seated."""
        self._count += 1
        return make_request(
            f"r{self._count}",
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=_OUTPUT_TOKENS,
            urgency=self._random.randint(1, 4) if level is None else level,
            tenant=f"tenant {self._count % self._tenants}",
        )

    def answer(self, step: SchedulerOutput, finish_one: bool = False) -> ModelRunnerOutput:
        """What a model would have answered; with `finish_one`, one request gets its last token."""
        if finish_one and step.num_scheduled_tokens:
            chosen = self._random.choice(list(step.num_scheduled_tokens))
            request = self.scheduler.requests[chosen]
            request.max_tokens = request.num_output_tokens + 1
        return model_output(self.scheduler, step)
