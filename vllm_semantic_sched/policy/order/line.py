"""One line of waiting jobs: a min-heap by rank plus an unsorted buffer (paper, Alg. 1)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.heap import AddressableHeap
from vllm_semantic_sched.policy.order.rank import Rank


class Line:
    """Waiting jobs of one level and tenant.

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

    @property
    def buffered(self) -> int:
        """Jobs in the unsorted buffer."""
        return len(self._buffer)

    def is_buffered(self, job: Job) -> bool:
        """Whether a job is in the buffer."""
        return job in self._buffer

    def buffer(self, job: Job) -> None:
        """Append a newly arrived job about which nothing is known yet."""
        self._buffer[job] = None

    def push(self, job: Job, rank: Rank) -> None:
        """Put a job into the heap; one that is queued already moves to its new rank."""
        self._buffer.pop(job, None)
        self._heap.push(job, rank)

    def remove(self, job: Job) -> None:
        """Take a job out."""
        if self._buffer.pop(job, self) is self:
            self._heap.discard(job)

    def peek(self) -> tuple[Rank, Job] | None:
        """The best job of both structures under its rank, or None."""
        best = self._heap.peek()
        head = None if best is None else (self._heap.key(best), best)
        if not self._buffer:
            return head
        oldest = next(iter(self._buffer))
        rank = self._default_rank(oldest)
        return (rank, oldest) if head is None or rank < head[0] else head

    def ordered(self) -> Iterator[tuple[Rank, Job]]:
        """The jobs by rank, lazily; the line must not change during the iteration."""
        ranked = ((self._heap.key(job), job) for job in self._heap.ordered())
        buffered = ((self._default_rank(job), job) for job in self._buffer)
        return heapq.merge(ranked, buffered, key=lambda pair: pair[0])
