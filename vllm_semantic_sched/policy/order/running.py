"""Jobs that hold KV on the device: the eviction max-heap (paper, Alg. 3) and the supervisor."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, Rank
from vllm_semantic_sched.policy.facts.profile import EngineProfile


class RunningSet:
    """Running jobs, least urgent first, and when each should be done.

    All running jobs advance together, one token a step, so the order by remaining time does not
    change while they run. It is stored as a finish tag: virtual time at the start plus remaining
    seconds, where virtual time moves on by one decode step per engine step. Tags stay frozen,
    no comparison reads a clock, and jobs started at different times compare correctly.

    Args:
        step_seconds: what one decode step takes.
    """

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._now = 0.0
        self._eviction: AddressableHeap[Job] = AddressableHeap()
        self._due: AddressableHeap[Job] = AddressableHeap()

    def adopt(self, policy: Policy, profile: EngineProfile) -> None:
        """Switch to a new profile; keys stored before stay as they are."""
        self._step_seconds = profile.gamma2

    def __len__(self) -> int:
        return len(self._eviction)

    def __contains__(self, job: object) -> bool:
        return job in self._eviction

    def __iter__(self) -> Iterator[Job]:
        """The jobs, in no particular order."""
        return iter(self._eviction)

    def add(self, job: Job, rank: Rank, remaining: float) -> None:
        """Store a job, or store it anew after its level or its prediction changed.

        Args:
            rank: as for a waiting job.
            remaining: predicted seconds of work left, whether or not the rank uses it.
        """
        # A rank without remaining time (zero, never reached otherwise) orders by arrival alone.
        tag = self._now + rank.remaining if rank.remaining else 0.0
        self._eviction.push(job, (-rank.level, -tag, -rank.sequence))
        self._due.push(job, self._now + remaining)

    def discard(self, job: Job) -> bool:
        """Take a job out; False if it is not stored."""
        self._due.discard(job)
        return self._eviction.discard(job)

    def order(self, job: Job) -> tuple[float, float, int]:
        """Sort key for running jobs, most urgent and soonest done first."""
        level, tag, sequence = self._eviction.key(job)
        return (-level, -tag, -sequence)

    def remaining(self, job: Job) -> float:
        """Predicted seconds of work left, as it was told less the steps since."""
        tag: float = -self._eviction.key(job)[1]
        return max(0.0, tag - self._now)

    def least_urgent(self) -> Job | None:
        """The root of the eviction heap: least urgent, most remaining time."""
        return self._eviction.peek()

    def by_eviction(self) -> Iterator[Job]:
        """Jobs in the order in which they would be evicted; lazily."""
        return self._eviction.ordered()

    @property
    def steps_to_outlived(self) -> int:
        """Steps after which `outlived` may return a job, if none comes or goes; erring below."""
        job = self._due.peek()
        if job is None:
            return sys.maxsize
        return max(0, int((self._due.key(job) - self._now) / self._step_seconds) - 1)

    def skip(self, steps: int) -> None:
        """As many engine steps have passed, `steps_to_outlived` at most."""
        self._now += steps * self._step_seconds

    def tick(self) -> None:
        """One engine step has passed."""
        self._now += self._step_seconds

    def outlived(self) -> list[Job]:
        """Jobs that should have finished by now and have not. The caller stores each again with a
        revised estimate (S3's supervisor), so a job comes up O(log length) times."""
        return list(self._due.pop_until(self._now, len(self._due)))
