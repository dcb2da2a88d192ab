"""Measures what running jobs use, at intervals instead of at every token."""

from collections.abc import Callable

from vllm_semantic_sched.policy.facts.capacity import AHEAD, Allocations
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, Stint
from vllm_semantic_sched.policy.profile.formula import EngineProfile


class UsageMeter:
    """Follows jobs while they have a seat; `len` counts them.

    A job is visited before it outgrows the KV that `allocations` know of, up to `AHEAD` tokens more
    than it has. Engine seconds are charged after use, negative ones for a prefill that was charged
    on admission but not computed.
    """

    def __init__(
        self,
        profile: Callable[[], EngineProfile],
        charge: Callable[[Job, float], None],
        allocations: Allocations,
    ) -> None:
        self._profile = profile
        self.tokens_per_step = 1  # most output tokens of a job; more with speculative decoding
        self.idle = 0  # running jobs that get no token now, because they are held
        self._charge = charge
        self._holdings = allocations
        self._step = 0
        self._due: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        return len(self._due)

    def start(self, job: Job) -> None:
        """Start following a job that got a seat and whose admission has been charged."""
        assert job.seat is not None
        job.seat.stint = stint = Stint(job.tokens, job.tokens, job.generated, self._profile())
        self._report(job, stint)

    def stop(self, job: Job) -> None:
        """Stop following a job; its `generated` and `computed` are up to date."""
        if job.seat is None or (stint := job.seat.stint) is None:
            return
        seconds = self._decode_seconds(job, stint)
        if job.generated == stint.generated and job.computed < stint.prefill:
            seconds -= stint.profile.prefill(job.computed, stint.prefill)
        job.seat.stint = None
        self._due.discard(job)
        self._charge(job, seconds)

    def step(self, observe: Callable[[Job], None]) -> None:
        """Count an engine step, and observe and visit the jobs that are due."""
        self._step += 1
        while (job := self._due.peek()) is not None and self._due.key(job) <= self._step:
            observe(job)
            assert job.seat is not None and job.seat.stint is not None
            self._report(job, job.seat.stint)

    def _report(self, job: Job, stint: Stint) -> None:
        self._charge(job, self._decode_seconds(job, stint))
        stint.charged = job.tokens
        self._holdings.occupy(job, job.tokens + AHEAD)
        self._due.push(job, self._step + max(1, AHEAD // self.tokens_per_step))

    def _decode_seconds(self, job: Job, stint: Stint) -> float:
        # Running jobs share the time of a decode step.
        sharing = max(1, len(self) - self.idle)
        profile = self._profile()
        price = profile.gamma1 * job.tokens + profile.batch_terms.sequences(sharing) / sharing
        return (job.tokens - stint.charged) * price
