"""Carries the stage decisions (policy/order/stage.py) into one call of vLLM's schedule()."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_semantic_sched.engine.capacity import Capacity
from vllm_semantic_sched.engine.vllm_api import (
    Scheduler,
    TokenLimits,
    hold_for_one_step,
    inflight_prefills,
    set_token_limits,
    token_limits,
)
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.job import Job


class StepLimit:
    """Lowers the token budgets that schedule() reads, and puts them back.

    Args:
        observe: updates a job's `generated` and `computed` from its request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        capacity: Capacity,
        jobs: dict[str, Job],
        observe: Callable[[Job], None],
    ) -> None:
        self._scheduler = scheduler
        self._capacity = capacity
        self._jobs = jobs
        self._observe = observe
        self._saved: TokenLimits | None = None

    def set(self, core: SchedulingCore) -> None:
        """Arrange the coming step. O(prefills under way)."""
        scheduler = self._scheduler
        newcomer = core.waiting.peek()
        prefills = inflight_prefills(scheduler)
        if not scheduler.running or (newcomer is None and not prefills):
            return
        prefilling = [
            self._jobs[request.request_id]
            for request in prefills
            if request.request_id in self._jobs
        ]
        decoding = (len(scheduler.running) - len(prefilling)) * (1 + scheduler.num_spec_tokens)
        if newcomer is not None and prefilling:
            self._let_in(core, newcomer, prefilling, decoding)
        self._protect_decodes(core, newcomer, prefilling, decoding)

    def restore(self) -> None:
        """Undo what `set` set."""
        if self._saved is not None:
            set_token_limits(self._scheduler, self._saved)
            self._saved = None

    def _let_in(
        self, core: SchedulingCore, newcomer: Job, prefilling: list[Job], decoding: int
    ) -> None:
        for job in prefilling:
            self._observe(job)
        budget = self._scheduler.max_num_scheduled_tokens - decoding
        yielding = core.prefills_that_yield(newcomer, prefilling, budget)
        # Sitting out for a newcomer that cannot come in would only waste the step.
        if yielding and self._capacity.admissible(self._scheduler.requests[newcomer.request_id]):
            self._pause(yielding)

    def _protect_decodes(
        self, core: SchedulingCore, newcomer: Job | None, prefilling: list[Job], decoding: int
    ) -> None:
        scheduler = self._scheduler
        best = scheduler.running[0]
        levels = [job.effective_level for job in prefilling]
        if newcomer is not None:
            levels.append(newcomer.effective_level)
        limit = core.prefill_token_limit(
            None if best.is_prefill_chunk else self._jobs[best.request_id].effective_level,
            min(levels, default=None),
        )
        if limit is None:
            return
        saved = self._saved = token_limits(scheduler)
        limits = saved._replace(step=min(decoding + limit, saved.step))
        if limit == 0:
            self._pause(prefilling)
        elif prefilling:
            # vLLM serves these before decodes that are less urgent than they are; none may take
            # the decodes' share of the budget.
            share = max(1, limit // len(prefilling))
            limits = limits._replace(prefill=min(share, saved.prefill or share))
        set_token_limits(scheduler, limits)

    def _pause(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            hold_for_one_step(self._scheduler, self._scheduler.requests[job.request_id])
