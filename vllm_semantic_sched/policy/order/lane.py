"""The waiting jobs of one level: a line for each tenant, and which tenant is next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.heap import AddressableHeap
from vllm_semantic_sched.policy.order.line import Line
from vllm_semantic_sched.policy.order.rank import Rank
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS, VirtualCounters


class Lane:
    """All waiting jobs of one level.

    Args:
        by_tenant: the tenant that was served least goes first, else there is one line for all.
        default_rank: see `Line`.

    Attributes:
        counters: service by tenant.
        overdue: those of the jobs that are overdue, by arrival.
    """

    def __init__(self, by_tenant: bool, default_rank: Callable[[Job], Rank]) -> None:
        self._by_tenant = by_tenant
        self._default_rank = default_rank
        self._lines: dict[str, Line] = {}
        self.counters = VirtualCounters()
        self.overdue: AddressableHeap[Job] = AddressableHeap()

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def buffered(self) -> int:
        """Jobs whose prediction is not back."""
        return sum(line.buffered for line in self._lines.values())

    def is_buffered(self, job: Job) -> bool:
        """Whether a job that is here awaits its prediction in the buffer."""
        return self._lines[self.tenant_of(job)].is_buffered(job)

    def push(self, job: Job, rank: Rank) -> None:
        """Put a job in, or to its new rank."""
        self._line(job).push(job, rank)
        if job.overdue:
            self.overdue.push(job, job.sequence)

    def buffer(self, job: Job) -> None:
        """Append a newly arrived job about which nothing is known yet."""
        self._line(job).buffer(job)

    def remove(self, job: Job) -> None:
        """Take a job out."""
        tenant = self.tenant_of(job)
        line = self._lines[tenant]
        line.remove(job)
        self.overdue.discard(job)
        if not len(line):
            del self._lines[tenant]
            self.counters.leave(tenant)

    def peek(self, may_go: Callable[[Job], bool]) -> tuple[Rank, Job] | None:
        """The next job under its rank; None if there is none.

        Args:
            may_go: whether a tenant may have a seat for its next job; others are passed over.
        """
        if not self._by_tenant:
            return self._lines[ANONYMOUS].peek() if self._lines else None
        for _, tenant in self.counters.ordered():
            head = self._lines[tenant].peek()
            if head is not None and may_go(head[1]):
                return head
        return None

    def ordered(self, cost: Callable[[Job], float]) -> Iterator[tuple[Rank, Job]]:
        """The jobs in the order in which they would go if nothing else happened, lazily.

        Args:
            cost: engine seconds that a job's admission adds to its tenant's counter.
        """
        lines: dict[str, Iterator[tuple[Rank, Job]]] = {}
        turns: list[tuple[float, int, str]] = []
        tenants = self.counters.ordered()
        upcoming = next(tenants, None)
        while turns or upcoming is not None:
            while upcoming is not None and (not turns or upcoming[0] <= turns[0][0]):
                counter, tenant = upcoming
                turns_before = len(lines)
                lines[tenant] = self._lines[tenant].ordered()
                heapq.heappush(turns, (counter, turns_before, tenant))
                upcoming = next(tenants, None)
            counter, place, tenant = heapq.heappop(turns)
            head = next(lines[tenant], None)
            if head is not None:
                yield head
                heapq.heappush(turns, (counter + cost(head[1]), place, tenant))

    def tenant_of(self, job: Job) -> str:
        """Whose line a job is in."""
        return job.tenant if self._by_tenant else ANONYMOUS

    def _line(self, job: Job) -> Line:
        tenant = self.tenant_of(job)
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = Line(self._default_rank)
            self.counters.enter(tenant)
        return line
