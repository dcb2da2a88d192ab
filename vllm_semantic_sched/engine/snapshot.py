"""What a step knows of vLLM: its own accounts, between two calls of schedule()."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.preemption import Preemptions
from vllm_semantic_sched.engine.vllm_api import PauseState, Request, Scheduler
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.retention import HostRoom
from vllm_semantic_sched.policy.snapshot import Progress

T = TypeVar("T")

_UNLIMITED = 2**40  # KV blocks where the model needs none


class once(Generic[T]):
    """A property that is computed at most once for each object. Its value hides it then, which
    takes a third of the time of `functools.cached_property` and its lock."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value: T = self._compute(instance)
        instance.__dict__[self._name] = value
        return value


class VllmSnapshot:
    """vLLM's accounts before a step. A `policy.snapshot.Snapshot`.

    Args:
        jobs: by request id.
        predictions: that have come back since the last step.
        returning: see `policy.snapshot.Snapshot`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: Mapping[str, Job],
        preemptions: Preemptions,
        can_end: Callable[[Request], bool],
        predictions: Iterable[tuple[Job, Prediction | None]] = (),
        returning: Collection[Job] = (),
    ) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._preemptions = preemptions
        self._can_end = can_end
        self.predictions = predictions
        self.returning = returning

    @once
    def paused(self) -> bool:
        return self._scheduler.pause_state is not PauseState.UNPAUSED

    @once
    def running(self) -> Sequence[Job]:
        return self._jobs_of(self._scheduler.running)

    @once
    def prefilling(self) -> Collection[Job]:
        return dict.fromkeys(self._jobs_of(vllm_api.running_prefills(self._scheduler)))

    @once
    def decoding(self) -> int:
        return len(self._scheduler.running) - len(self.prefilling)

    @once
    def loaded(self) -> Sequence[Job]:
        scheduler = self._scheduler
        if not vllm_api.loaded(scheduler):
            return ()
        jobs = self._jobs_of(scheduler.kv_holding_waiting)
        return [job for job in jobs if self.is_ready(job)]

    @once
    def idle(self) -> Sequence[Job]:
        sessions = self._jobs_of(vllm_api.idle_sessions(self._scheduler))
        return sorted(sessions, key=lambda job: (-job.effective_level, job.entered))

    @once
    def seats(self) -> int:
        # vLLM seats waiting requests that hold blocks before all others.
        return vllm_api.free_seats(self._scheduler) - vllm_api.loaded(self._scheduler)

    @once
    def blocks(self) -> int:
        """Free blocks, less vLLM's watermark, less one for each running request that is about to
        begin a block. O(running)."""
        scheduler = self._scheduler
        if not vllm_api.total_kv_blocks(scheduler):
            return _UNLIMITED
        size = scheduler.block_size
        starting = sum([request.num_computed_tokens % size == 0 for request in scheduler.running])
        free = vllm_api.free_kv_blocks(scheduler)
        return free - scheduler.kv_cache_manager.watermark_blocks - starting

    @once
    def coming_blocks(self) -> int:
        return vllm_api.deferred_blocks(self._scheduler)

    @once
    def frees_at_once(self) -> bool:
        return vllm_api.frees_at_once(self._scheduler)

    @once
    def reserved_blocks(self) -> int:
        return vllm_api.reserved_blocks(self._scheduler)

    @once
    def kv_use(self) -> float:
        # A model without a KV cache never runs short of it.
        empty = not vllm_api.total_kv_blocks(self._scheduler)
        return 0.0 if empty else self._scheduler.kv_cache_manager.usage

    @once
    def token_budget(self) -> float:
        scheduler = self._scheduler
        # Of what a step may have as input, each request takes room for its drafter, too.
        drafting = vllm_api.drafting_slots(scheduler) * len(self.prefilling)
        most_input = scheduler.scheduler_config.max_num_batched_tokens - drafting
        return min(scheduler.max_num_scheduled_tokens, most_input)

    @property
    def tokens_per_decode(self) -> int:
        scheduler = self._scheduler
        return 1 + scheduler.num_spec_tokens + vllm_api.drafting_slots(scheduler)

    def progress(self, job: Job) -> Progress:
        request = self._request(job)
        with_kv = vllm_api.tokens_with_kv(request)
        return Progress(request.num_computed_tokens, request.num_output_tokens, with_kv)

    def can_advance(self, job: Job) -> bool:
        return vllm_api.can_advance(self._scheduler, self._request(job))

    def freeable_blocks(self, job: Job) -> int | None:
        return vllm_api.freeable_blocks(self._scheduler, self._request(job))

    def next_blocks(self, job: Job) -> int:
        return int(self._request(job).num_computed_tokens % self._scheduler.block_size == 0)

    def host_room(self, job: Job, with_kv: int) -> HostRoom | None:
        return self._preemptions.host_room(self._request(job), with_kv)

    def can_end(self, job: Job) -> bool:
        request = self._scheduler.requests.get(job.request_id)
        return request is not None and self._can_end(request)

    def is_ready(self, job: Job) -> bool:
        request = self._request(job)
        ready = vllm_api.is_ready(self._scheduler, request)
        return ready and not vllm_api.awaits_lookup(self._scheduler, request)

    def needed_blocks(self, job: Job) -> int:
        return vllm_api.blocks_needed(self._scheduler, self._request(job))

    def cached_tokens(self, job: Job) -> int:
        return vllm_api.cached_tokens(self._scheduler, self._request(job))

    def obstacles(self, job: Job) -> Sequence[Collection[Job]]:
        groups = vllm_api.obstacles(self._scheduler, self._request(job))
        return [self._jobs_of(group) for group in groups]

    def _request(self, job: Job) -> Request:
        return self._scheduler.requests[job.request_id]

    def _jobs_of(self, requests: Iterable[Request]) -> list[Job]:
        find = self._jobs.get
        jobs = [find(request.request_id) for request in requests]
        return [job for job in jobs if job is not None]
