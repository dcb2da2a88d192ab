"""Carries the stage gate's answer (policy/stage.py) into one call of vLLM's schedule()."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.job import Job

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class StepLimit:
    """Lowers the token budgets that schedule() reads, and puts them back."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._saved: tuple[int, int] | None = None

    def set(self, core: SchedulingCore, jobs: dict[str, Job]) -> None:
        """Limit the coming step if an urgent decode needs it. O(prefills under way)."""
        scheduler = self._scheduler
        if not scheduler.running:
            return
        best = scheduler.running[0]
        prefilling = [
            jobs[request.request_id]
            for request in scheduler._inflight_prefills
            if request.request_id in jobs
        ]
        next_up = core.waiting.peek()
        candidates = [job.level for job in prefilling]
        if next_up is not None:
            candidates.append(next_up.level)
        limit = core.prefill_token_limit(
            None if best.is_prefill_chunk else jobs[best.request_id].level,
            min(candidates, default=None),
        )
        if limit is None:
            return
        config = scheduler.scheduler_config
        self._saved = (scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold)
        decoding = len(scheduler.running) - len(prefilling)
        budget = decoding * (1 + scheduler.num_spec_tokens) + limit
        scheduler.max_num_scheduled_tokens = min(budget, self._saved[0])
        if limit and prefilling:
            # Running prefills come before decodes that are less urgent than they are; none may
            # take the decodes' share.
            share = max(1, limit // len(prefilling))
            config.long_prefill_token_threshold = min(share, self._saved[1] or share)
        elif not limit:
            for job in prefilling:  # sit out this one step
                request = scheduler.requests[job.request_id]
                request.next_decode_eligible_step = scheduler.current_step + 2

    def restore(self) -> None:
        """Undo `set`; does nothing if it set nothing."""
        if self._saved is not None:
            scheduler = self._scheduler
            scheduler.max_num_scheduled_tokens, threshold = self._saved
            scheduler.scheduler_config.long_prefill_token_threshold = threshold
            self._saved = None
