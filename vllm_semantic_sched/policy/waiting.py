"""The waiting queue: a min-heap by rank plus an unsorted buffer (paper, Alg. 1)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from vllm_semantic_sched.policy.heap import AddressableHeap
from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.rank import Rank


class WaitingQueue:
    """Jobs without a seat.

    Jobs about which something is known are in the heap under their rank. Jobs whose prediction
    has not come back wait in the buffer in arrival order; they are schedulable all the same, at
    a default rank, when nothing better is there. All operations are O(log n).

    Args:
        default_rank: rank of a buffered job. It must rise with the sequence number alone, so
            that the oldest buffered job is the best one.
    """

    def __init__(self, default_rank: Callable[[Job], Rank]) -> None:
        self._default_rank = default_rank
        self._heap: AddressableHeap[Job] = AddressableHeap()
        self._buffer: dict[Job, None] = {}

    def __len__(self) -> int:
        return len(self._heap) + len(self._buffer)

    def __contains__(self, job: object) -> bool:
        return job in self._heap or job in self._buffer

    def __iter__(self) -> Iterator[Job]:
        """The jobs, in no particular order."""
        yield from self._heap
        yield from self._buffer

    @property
    def buffered(self) -> int:
        """Jobs in the unsorted buffer."""
        return len(self._buffer)

    def buffer(self, job: Job) -> None:
        """Append a newly arrived job about which nothing is known yet."""
        self._buffer[job] = None

    def push(self, job: Job, rank: Rank) -> None:
        """Put a job into the heap; one that is queued already moves to its new rank."""
        self._buffer.pop(job, None)
        self._heap.push(job, rank)

    def rerank(self, job: Job, rank: Rank) -> None:
        """Give a queued job a new rank; a buffered one stays where it is."""
        if job not in self._buffer and self._heap.key(job) != rank:
            self._heap.push(job, rank)

    def remove(self, job: Job) -> bool:
        """Take a job out; False if it is not queued."""
        if job in self._buffer:
            del self._buffer[job]
            return True
        return self._heap.discard(job)

    def peek(self) -> Job | None:
        """The job that runs next, of both structures, or None."""
        best = self._heap.peek()
        if not self._buffer:
            return best
        oldest = next(iter(self._buffer))
        if best is None or self._default_rank(oldest) < self._heap.key(best):
            return oldest
        return best

    def pop(self) -> Job:
        """Remove and return what `peek` returns. IndexError if empty."""
        job = self.peek()
        if job is None:
            raise IndexError("pop from an empty waiting queue")
        self.remove(job)
        return job

    def ordered(self) -> Iterator[Job]:
        """The jobs by rank, lazily; the queue must not change during the iteration."""
        ranked = ((self._heap.key(job), job) for job in self._heap.ordered())
        buffered = ((self._default_rank(job), job) for job in self._buffer)
        for _, job in heapq.merge(ranked, buffered, key=lambda pair: pair[0]):
            yield job
