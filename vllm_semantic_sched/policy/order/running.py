"""Running jobs: the eviction max-heap (paper, Alg. 3) and the timer of the supervisor."""

import sys
from collections.abc import Callable, Iterator

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, Rank


class RunningSet:
    """Running jobs, least urgent first, and their expected finish.

    All running jobs advance by one token per step, so their order by remaining time does not
    change. It is stored as a finish tag: virtual time at the start plus remaining seconds, where
    virtual time advances by one decode step (`step_seconds`) per engine step. A held job does not
    advance: when it is released, its tag moves by what it missed.

    Args:
        step_seconds: by the given profile. Stored keys stay when it changes.
    """

    def __init__(self, step_seconds: Callable[[], float]) -> None:
        self._step_seconds = step_seconds
        self._now = 0.0
        self._by_eviction: AddressableHeap[Job] = AddressableHeap()
        self._due: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        return len(self._by_eviction)

    def __contains__(self, job: object) -> bool:
        return job in self._by_eviction

    def __iter__(self) -> Iterator[Job]:
        """The jobs, in no particular order."""
        return iter(self._by_eviction)

    def add(self, job: Job, rank: Rank, remaining: float) -> None:
        """Store or update a job; `remaining`: seconds of work left, whatever its rank uses."""
        # Zero means that the rank does not use remaining time: order by arrival alone.
        tag = self._now + rank.remaining if rank.remaining else 0.0
        self._by_eviction.push(job, (-rank.level, -tag, -rank.sequence))
        self._due.push(job, self._now + remaining)
        if job.seat is not None and job.seat.held_at is not None:
            job.seat.held_at = self._now

    def hold(self, job: Job) -> None:
        """A stored job gets no tokens until `release`."""
        assert job.seat is not None
        job.seat.held_at = self._now

    def release(self, job: Job) -> None:
        """A held job gets tokens again."""
        assert job.seat is not None and job.seat.held_at is not None
        missed, job.seat.held_at = self._now - job.seat.held_at, None
        if missed and job in self:
            level, tag, sequence = self._by_eviction.key(job)
            self._by_eviction.push(job, (level, tag - missed if tag else tag, sequence))
            self._due.push(job, self._due.key(job) + missed)

    def discard(self, job: Job) -> bool:
        """Remove a job; False if it is not stored."""
        self._due.discard(job)
        return self._by_eviction.discard(job)

    def order(self, job: Job) -> tuple[float, float, int]:
        """Sort key for running jobs, most urgent and shortest first."""
        level, tag, sequence = self._by_eviction.key(job)
        return (-level, -tag, -sequence)

    def remaining(self, job: Job) -> float:
        """Predicted seconds of work left: the stored value less the steps since."""
        tag: float = -self._by_eviction.key(job)[1]
        held_at = job.seat.held_at if job.seat is not None else None
        return max(0.0, tag - (self._now if held_at is None else held_at))

    def least_urgent(self) -> Job | None:
        """The first job in the order of eviction; None if none is stored."""
        return self._by_eviction.peek()

    def by_eviction(self) -> Iterator[Job]:
        """Jobs in the order of eviction; lazily."""
        return (job for _, job in self._by_eviction.ordered())

    @property
    def steps_to_outlived(self) -> int:
        """Lower bound on the steps until `outlived` returns a job, if none comes or goes."""
        first = self._due.first()
        steps = (first[0] - self._now) / self._step_seconds() if first else sys.maxsize
        return max(0, int(steps) - 1)

    @property
    def may_outlive(self) -> bool:
        """Whether `outlived` may return a job after the next `tick`."""
        return self._due.may_reach(self._now + self._step_seconds())

    def tick(self, steps: int = 1) -> None:
        """Advance by engine steps: one, or at most `steps_to_outlived`."""
        self._now += steps * self._step_seconds()

    def outlived(self) -> list[Job]:
        """Jobs that have outlived their estimate; the caller stores them with a new one (S3)."""
        return list(self._due.pop_until(self._now, len(self._due)))
