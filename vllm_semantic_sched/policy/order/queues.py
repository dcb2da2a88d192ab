"""The waiting jobs of one level: a queue for each tenant, and which tenant is next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, Rank
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS, VirtualCounters


class TenantQueue:
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
        """The jobs by rank, lazily; the queue must not change during the iteration."""
        ranked = ((self._heap.key(job), job) for job in self._heap.ordered())
        buffered = ((self._default_rank(job), job) for job in self._buffer)
        return heapq.merge(ranked, buffered, key=lambda pair: pair[0])


class LevelQueue:
    """All waiting jobs of one level.

    Args:
        by_tenant: the tenant that was served least goes first, else one queue serves all.
        default_rank: see `TenantQueue`.

    Attributes:
        counters: service by tenant.
        overdue: those of the jobs that are overdue, by arrival.
    """

    def __init__(self, by_tenant: bool, default_rank: Callable[[Job], Rank]) -> None:
        self._by_tenant = by_tenant
        self._default_rank = default_rank
        self._queues: dict[str, TenantQueue] = {}
        self.counters = VirtualCounters()
        self.overdue: AddressableHeap[Job] = AddressableHeap()

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def buffered(self) -> int:
        """Jobs whose prediction is not back."""
        return sum(queue.buffered for queue in self._queues.values())

    def is_buffered(self, job: Job) -> bool:
        """Whether a job that is here awaits its prediction in the buffer."""
        return self._queues[self.tenant_of(job)].is_buffered(job)

    def push(self, job: Job, rank: Rank) -> None:
        """Put a job in, or to its new rank."""
        self._queue_of(job).push(job, rank)
        if job.overdue:
            self.overdue.push(job, job.sequence)

    def buffer(self, job: Job) -> None:
        """Append a newly arrived job about which nothing is known yet."""
        self._queue_of(job).buffer(job)

    def remove(self, job: Job) -> None:
        """Take a job out."""
        tenant = self.tenant_of(job)
        queue = self._queues[tenant]
        queue.remove(job)
        self.overdue.discard(job)
        if not len(queue):
            del self._queues[tenant]
            self.counters.leave(tenant)

    def peek(self, may_go: Callable[[Job], bool]) -> tuple[Rank, Job] | None:
        """The next job under its rank; None if there is none.

        Args:
            may_go: whether a tenant may have a seat for its next job; others are passed over.
        """
        if not self._by_tenant:
            return self._queues[ANONYMOUS].peek() if self._queues else None
        for _, tenant in self.counters.ordered():
            head = self._queues[tenant].peek()
            if head is not None and may_go(head[1]):
                return head
        return None

    def ordered(self, cost: Callable[[Job], float]) -> Iterator[tuple[Rank, Job]]:
        """The jobs in the order in which they would go if nothing else happened, lazily.

        Args:
            cost: engine seconds that a job's admission adds to its tenant's counter.
        """
        queues: dict[str, Iterator[tuple[Rank, Job]]] = {}
        turns: list[tuple[float, int, str]] = []
        tenants = self.counters.ordered()
        upcoming = next(tenants, None)
        while turns or upcoming is not None:
            while upcoming is not None and (not turns or upcoming[0] <= turns[0][0]):
                counter, tenant = upcoming
                turns_before = len(queues)
                queues[tenant] = self._queues[tenant].ordered()
                heapq.heappush(turns, (counter, turns_before, tenant))
                upcoming = next(tenants, None)
            counter, place, tenant = heapq.heappop(turns)
            head = next(queues[tenant], None)
            if head is not None:
                yield head
                heapq.heappush(turns, (counter + cost(head[1]), place, tenant))

    def tenant_of(self, job: Job) -> str:
        """Whose queue a job is in."""
        return job.tenant if self._by_tenant else ANONYMOUS

    def _queue_of(self, job: Job) -> TenantQueue:
        tenant = self.tenant_of(job)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TenantQueue(self._default_rank)
            self.counters.enter(tenant)
        return queue
