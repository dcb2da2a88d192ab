"""Carries the stage decisions (policy/order/stage.py) into one call of vLLM's schedule()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm_semantic_sched.engine.capacity import Capacity
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


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
        self._saved: tuple[int, int] | None = None

    def set(self, core: SchedulingCore) -> None:
        """Arrange the coming step. O(prefills under way)."""
        scheduler = self._scheduler
        newcomer = core.waiting.peek()
        if not scheduler.running or (newcomer is None and not scheduler._inflight_prefills):
            return
        prefilling = [
            self._jobs[request.request_id]
            for request in scheduler._inflight_prefills
            if request.request_id in self._jobs
        ]
        decoding = (len(scheduler.running) - len(prefilling)) * (1 + scheduler.num_spec_tokens)
        if newcomer is not None and prefilling:
            self._let_in(core, newcomer, prefilling, decoding)
        self._protect_decodes(core, newcomer, prefilling, decoding)

    def restore(self) -> None:
        """Undo what `set` set."""
        if self._saved is not None:
            scheduler = self._scheduler
            scheduler.max_num_scheduled_tokens, threshold = self._saved
            scheduler.scheduler_config.long_prefill_token_threshold = threshold
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
        config = scheduler.scheduler_config
        self._saved = (scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold)
        scheduler.max_num_scheduled_tokens = min(decoding + limit, self._saved[0])
        if limit == 0:
            self._pause(prefilling)
        elif prefilling:
            # vLLM serves these before decodes that are less urgent than they are; none may take
            # the decodes' share of the budget.
            share = max(1, limit // len(prefilling))
            config.long_prefill_token_threshold = min(share, self._saved[1] or share)

    def _pause(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            # schedule() counts the step up before it looks at this.
            request = self._scheduler.requests[job.request_id]
            request.next_decode_eligible_step = self._scheduler.current_step + 2
