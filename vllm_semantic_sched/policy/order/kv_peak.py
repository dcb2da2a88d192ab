"""Admission by the predicted peak of KV use (Past-Future scheduler, Gong et al., arXiv 2507.10150).

vLLM admits a request as soon as its prompt fits, and preempts when answers outgrow the blocks. Here
a request is admitted only if, by predicted lengths, all running ones fit at every later step.
"""

import bisect
import itertools
import math
import sys
from collections.abc import Callable

from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job

_EXEMPT_LEVEL = 1  # requests of this and more urgent levels start regardless
_QUANTILE = 0.5  # of the predicted lengths that counts; higher would be more cautious


class KvPeak:
    """Predicts the KV tokens of the running jobs at every later step, if the policy asks for it.

    All running jobs grow by one token per step, so n jobs that are left at step e, and had b tokens
    together at step 0 if counted back, hold b + n e then, whatever the present step: only jobs that
    come, go or outlive their estimate change it. Use peaks when a job ends.

    A question costs O(log running), the first one after a change O(running log running), a step
    O(log running) per outlived estimate. The peak is overestimated rather than missed: shared
    blocks count for each job, and a job counts a block more than its tokens fill and grows from its
    admission on. A candidate does not wait because of a peak after its own end.
    """

    def __init__(self, tokens_within: Callable[[Job, float], float]) -> None:
        self.capacity = math.inf  # KV tokens of the engine; inf: unlimited or not known yet
        self.block_size = 1
        self._tokens_within = tokens_within  # see `Estimator.tokens`
        self._step = 0
        self._ends: AddressableHeap[Job] = AddressableHeap()  # last step by estimate
        # By the last step, latest first: ends (negative), sums of starts, and for each place the
        # highest use at its end and those of later places if one more job runs.
        self._sorted: tuple[list[float], list[float], list[float]] | None = None

    def set_capacity(self, capacity: EngineCapacity) -> None:
        """Called once the engine knows its KV blocks."""
        self.block_size = capacity.block_size
        if capacity.blocks is not None:
            self.capacity = capacity.blocks * capacity.block_size

    def __len__(self) -> int:
        return len(self._ends)

    def admits(self, job: Job) -> bool:
        """Whether a waiting job may start by its predicted use; always, if no other job runs."""
        if not len(self._ends) or self.capacity == math.inf:
            return True
        exempt = job.level <= _EXEMPT_LEVEL or job.overdue
        return exempt or self.peak_with(job) <= self.capacity

    def peak_with(self, job: Job) -> float:
        """Highest predicted use in tokens while a job runs that starts now."""
        ends, starts, later = self._sums()
        start, end = self._measure(job)
        longer = bisect.bisect_right(ends, -end)  # jobs that end at the same step or after it
        at_end = starts[longer] + start + (longer + 1) * end
        return max(at_end, start + later[longer])

    def add(self, job: Job) -> None:
        """Count a job that gets a seat, or whose estimate changed."""
        start, end = self._measure(job)
        assert job.seat is not None
        job.seat.start = start
        self._ends.push(job, end)
        self._sorted = None

    def clear(self) -> None:
        """Forget all jobs: another policy does not plan with them."""
        self._ends = AddressableHeap()
        self._sorted = None

    def discard(self, job: Job) -> None:
        """Stop counting a job that lost its seat or ended; no-op if it is not counted."""
        if self._ends.discard(job):
            self._sorted = None

    def tick(self, steps: int = 1) -> None:
        """Record that every counted job has grown by a token in each of these steps."""
        self._step += steps

    @property
    def steps_to_outlived(self) -> int:
        """Steps until a job outlives its estimate."""
        first = self._ends.first()
        return max(0, int(first[0]) - self._step) if first else sys.maxsize

    @property
    def may_outlive(self) -> bool:
        """Whether a job may have outlived its estimate in the next step."""
        return self._ends.may_reach(self._step + 1)

    def revise(self, observe: Callable[[Job], None]) -> list[Job]:
        """Estimate jobs anew that have outlived their estimate; returns them."""
        outlived = list(self._ends.pop_until(self._step, len(self._ends)))
        for job in outlived:
            observe(job)
            self.add(job)
        return outlived

    def _measure(self, job: Job) -> tuple[int, int]:
        """Tokens of a job less the present step, with a block to spare, and its last step."""
        left = max(1, math.ceil(self._tokens_within(job, _QUANTILE)) - job.tokens)
        return job.tokens + self.block_size - 1 - self._step, self._step + left

    def _sums(self) -> tuple[list[float], list[float], list[float]]:
        if self._sorted is None:
            jobs = sorted(self._ends, key=self._ends.key, reverse=True)
            ends = [self._ends.key(job) for job in jobs]
            seats = [job.seat for job in jobs if job.seat is not None]
            starts = [0.0, *itertools.accumulate(float(seat.start) for seat in seats)]
            # With one more job, n + 1 + 1 hold a token more per step at the end of place n.
            at_ends = [starts[n + 1] + (n + 2) * end for n, end in enumerate(ends)]
            later = [*itertools.accumulate(reversed(at_ends), max)][::-1]
            self._sorted = [-end for end in ends], starts, [*later, -math.inf]
        return self._sorted
