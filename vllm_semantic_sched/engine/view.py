"""What a scheduling step asks of vLLM and orders from it (`policy.view.EngineView`)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.vllm_api import (
    PauseState,
    Request,
    Scheduler,
    TokenLimits,
    blocks_can_be_freed,
    blocks_freed_by,
    blocks_needed,
    can_advance,
    free_kv_blocks,
    free_seats,
    hold_for_one_step,
    inflight_prefills,
    is_ready,
    kv_cache_groups,
    kv_cache_usage,
    set_token_limits,
    token_limits,
    total_kv_blocks,
    total_seats,
    watermark_blocks,
)
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.stage import StageLimits
from vllm_semantic_sched.policy.overload.refusal import Refusal

# More requests than that are put into order by sorting all.
_FEW = 4


def engine_capacity(scheduler: Scheduler) -> EngineCapacity:
    """Seats and KV blocks in all, as reservations count them."""
    return EngineCapacity(
        seats=total_seats(scheduler),
        # Each group of layers has blocks of its own.
        blocks=total_kv_blocks(scheduler) // kv_cache_groups(scheduler),
        block_size=scheduler.block_size,
    )


class VllmView:
    """Answers from vLLM's own accounts; orders go to the scheduler.

    Args:
        scheduler: its queues and its KV cache manager.
        jobs: by request id.
        clock: seconds during which the engine was serving.
        guard: keeps an error from losing a running request.
        predictions: those that have arrived since the last call.
        preemptions: plans them and carries them out.
        end: ends a job without its answer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        core: SchedulingCore,
        jobs: Mapping[str, Job],
        clock: Callable[[], float],
        guard: Guard,
        *,
        predictions: Callable[[], Iterable[tuple[Job, Prediction | None]]],
        preemptions: Preemptions,
        end: Callable[[Job, Refusal], None],
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._jobs = jobs
        self._guard = guard
        self._preemptions = preemptions
        self._saved_limits: TokenLimits | None = None
        self._held_decodes = 0
        self.now = clock
        self.predictions = predictions
        self.end = end

    # Questions, see `EngineView`

    def tokens_held(self) -> int:
        """About how many tokens running requests have KV of: whole blocks, O(1)."""
        scheduler = self._scheduler
        used = total_kv_blocks(scheduler) - free_kv_blocks(scheduler)
        return used * scheduler.block_size // kv_cache_groups(scheduler)

    def observe(self, job: Job) -> None:
        request = self._request(job)
        job.computed = request.num_computed_tokens
        job.generated = request.num_output_tokens

    def running_by_urgency(self) -> Sequence[Job]:
        jobs = self._jobs
        return [
            jobs[request.request_id]
            for request in self._scheduler.running
            if request.request_id in jobs
        ]

    def can_advance(self, job: Job) -> bool:
        return can_advance(self._scheduler, self._request(job))

    def prefilling(self) -> Collection[Job]:
        """Running jobs whose prefill is not complete. O(prefills under way)."""
        jobs = self._jobs
        prefills = [
            jobs[request.request_id]
            for request in inflight_prefills(self._scheduler)
            if request.request_id in jobs
        ]
        for job in prefills:
            self.observe(job)
        return prefills

    def most_urgent_decode(self) -> Job | None:
        running = self._scheduler.running
        if not running or running[0].is_prefill_chunk:
            return None
        return self._jobs[running[0].request_id]

    def is_paused(self) -> bool:
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    def free_seats(self) -> int:
        return free_seats(self._scheduler)

    def free_blocks(self) -> int:
        """Free blocks, less vLLM's watermark, less one for each running request that is about to
        begin a block. O(running)."""
        scheduler = self._scheduler
        block_size = scheduler.block_size
        starting = sum(
            request.num_computed_tokens % block_size == 0 for request in scheduler.running
        )
        return free_kv_blocks(scheduler) - watermark_blocks(scheduler) - starting

    def kv_use(self) -> float:
        return kv_cache_usage(self._scheduler)

    def token_budget(self) -> float:
        return token_limits(self._scheduler).step

    def decode_tokens(self) -> int:
        """Tokens of the budget that decoding requests take, draft tokens included."""
        scheduler = self._scheduler
        decoding = len(scheduler.running) - len(inflight_prefills(scheduler)) - self._held_decodes
        return decoding * (1 + scheduler.num_spec_tokens)

    def is_ready(self, job: Job) -> bool:
        return is_ready(self._scheduler, self._request(job))

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job takes, less what the prefix cache holds for it."""
        return blocks_needed(self._scheduler, self._request(job))

    def freeable_blocks(self, job: Job) -> int | None:
        """Blocks that a running job does not share; None while a step in flight may write them."""
        request = self._request(job)
        if not blocks_can_be_freed(self._scheduler, request):
            return None
        return blocks_freed_by(self._scheduler, request)

    def preemption_seconds(self, job: Job) -> float:
        return self._preemptions.plan(job, self._request(job)).seconds

    # Orders

    def reposition(self, jobs: Iterable[Job]) -> None:
        running = self._scheduler.running
        moved = {self._request(job): None for job in jobs if job.state is JobState.RUNNING}
        if len(moved) > _FEW:
            with self._guard("ordering running requests"):
                order, of = self._core.running.order, self._jobs
                running.sort(key=lambda request: order(of[request.request_id]))
            return
        # All out before the first goes in again: a place is found among those that are in order.
        out = []
        for request in moved:
            with self._guard("ordering running requests"):
                running.remove(request)
                out.append(request)
        for request in out:
            self.insert(request)

    def insert(self, request: Request) -> None:
        """Put a request that has a seat into vLLM's list of running ones, in order of rank."""
        running, order, jobs = self._scheduler.running, self._core.running.order, self._jobs
        place = len(running)  # whatever fails, the request must not get lost
        with self._guard("ordering running requests"):
            place = bisect.bisect(
                running,
                order(jobs[request.request_id]),
                key=lambda other: order(jobs[other.request_id]),
            )
        running.insert(place, request)

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        """Preempt a running job; vLLM queues it again."""
        self._preemptions.evict(self._request(job), reason, beneficiary)

    def hold(self, jobs: Collection[Job]) -> None:
        """Give running requests no token in the next schedule()."""
        scheduler = self._scheduler
        prefills = inflight_prefills(scheduler)
        for job in jobs:
            request = self._request(job)
            hold_for_one_step(scheduler, request)
            self._held_decodes += request not in prefills

    def limit_prefills(self, limits: StageLimits) -> None:
        """Lower the limits that the next schedule() obeys, until `restore_limits`."""
        scheduler = self._scheduler
        for job in limits.held:
            hold_for_one_step(scheduler, self._request(job))
        if not limits.gated:
            return
        saved = self._saved_limits = self._saved_limits or token_limits(scheduler)
        set_token_limits(scheduler, saved._replace(step=min(self.decode_tokens(), saved.step)))

    def restore_limits(self) -> None:
        """Undo what `hold` and `limit_prefills` did."""
        self._held_decodes = 0
        if self._saved_limits is not None:
            set_token_limits(self._scheduler, self._saved_limits)
            self._saved_limits = None

    def _request(self, job: Job) -> Request:
        return self._scheduler.requests[job.request_id]
