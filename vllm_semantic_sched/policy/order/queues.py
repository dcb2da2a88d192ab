"""The waiting jobs of one level: a queue per tenant, and the choice of the next tenant."""

import heapq
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import AHEAD, Allocations
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, Rank, rank_of
from vllm_semantic_sched.policy.limits import Limits
from vllm_semantic_sched.policy.order.credit import Overtaking
from vllm_semantic_sched.policy.order.fair_share import FairShare
from vllm_semantic_sched.policy.order.kv_peak import KvPeak
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS, VirtualCounters

_SURE = 0.9  # share of answers that are no longer than what a deadline is ordered by


class Used(NamedTuple):
    """What the policy in force uses. Without it, the code for it is not entered."""

    aging: bool = False
    timers: bool = False  # of waiting jobs, by aging or deadlines
    kv_peak: bool = False
    shares: bool = False
    top_cap: bool = False  # on a tenant's requests at the top levels
    tenants: bool = False  # the least served tenant goes first within a level


def used_by(policy: Policy) -> Used:
    """What a policy uses."""
    return Used(
        aging=policy.aging.enabled,
        timers=policy.aging.enabled or policy.deadlines.raises,
        kv_peak=policy.kv_peak.enabled,
        shares=policy.fair_share.enabled,
        top_cap=policy.tenants.top.share < 1.0,
        tenants=policy.tenants.fair,
    )


def ranks_only(policy: Policy) -> Used:
    """What a queue uses whose jobs go by their ranks, whatever the policy says."""
    return Used()


class OrderingRules:
    """What counts in a queue besides the ranks of its jobs: offsets of the levels, and limits."""

    def __init__(
        self,
        ref: PolicyRef,
        estimates: Estimator,
        used: Callable[[Policy], Used] = used_by,
    ) -> None:
        policy = ref.policy
        self.ref = ref
        self.allocations = Allocations(policy.levels)
        self.overtaking = Overtaking()
        self.fair_share = FairShare(ref)
        self.limits = Limits(ref, self.allocations)
        self.kv_peak = KvPeak(estimates.tokens)
        self.used = Derived(ref, used)
        # A reload cannot change these two (`policy.live`).
        self.by_level = policy.uses_urgency  # whether the rank uses the level
        self.by_tenant = self.used.table.tenants
        self._estimates = estimates

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.ref.policy

    def default_rank(self, job: Job) -> Rank:
        """Rank of a job without a prediction; it depends only on the sequence number and rises
        with it, so that the oldest buffered job is the best one."""
        # Not job.level: after a change of policy all buffered jobs must have the same level.
        level = self.ref.policy.default_level
        # Among weighted levels they go first: one of them may be urgent.
        remaining = 0.0 if self.ref.policy.weighs(level) else float("inf")
        return rank_of(self.ref.policy.base, level, remaining, job.sequence)

    def admits(self, job: Job) -> bool:
        """Whether a job may have a seat now; a level whose first job may not is skipped."""
        return self.limits.admits_tenant(job) and self.reserves_admit(job)

    def reserves_admit(self, job: Job) -> bool:
        """Whether hard reservations leave a job what it needs."""
        return self.limits.admits_level(job.level, job.tokens + AHEAD)

    @property
    def has_limits(self) -> bool:
        """Whether `admits` may refuse."""
        table = self.limits.table
        return table.caps_tenants or table.reserves_hard

    def admission_seconds(self, job: Job) -> float:
        """Engine time until a job can decode: load and prefill."""
        profile = self._estimates.profile
        return profile.load(job.swapped) + profile.prefill(job.swapped, job.tokens)

    def answer_seconds(self, job: Job) -> float:
        """Time from a job's seat within which nine of ten such answers end, while all seats are in
        use: who is to be in time must start a little early."""
        capacity, terms = self.allocations.capacity, self._estimates.profile.batch_terms
        step = terms.sequences(1 if capacity is None else capacity.seats)
        return self._estimates.answer_seconds(job, step, _SURE)


class TenantQueue:
    """Waiting jobs of one level and tenant: those of known level in a heap by rank, those without a
    prediction yet in a buffer in arrival order, at a default rank. Jobs set aside are in neither.
    All operations are O(log n)."""

    def __init__(self, rules: OrderingRules) -> None:
        self._rules = rules
        self._heap: AddressableHeap[Job] = AddressableHeap()
        self.buffer: dict[Job, None] = {}
        self._aside: dict[Job, Rank] = {}

    def __len__(self) -> int:
        return len(self._heap) + len(self.buffer) + len(self._aside)

    def push(self, job: Job, rank: Rank) -> bool:
        """Put a job into the heap, or move it there; whether `peek` may change."""
        if self._aside:
            self._aside.pop(job, None)
        if not self.buffer:
            return self._heap.push(job, rank)
        was_buffered = job in self.buffer
        if was_buffered:
            del self.buffer[job]
        return self._heap.push(job, rank) or was_buffered

    def remove(self, job: Job) -> None:
        """Remove a job; no-op if it is not here."""
        if self.buffer.pop(job, self) is self and not self._heap.discard(job):
            self._aside.pop(job, None)

    def lift(self, job: Job) -> Rank | None:
        """Remove a job and return its rank, for `push`; None, with no effect, if it is buffered."""
        if job in self.buffer:
            return None
        rank: Rank = self._heap.key(job)
        self._heap.discard(job)
        return rank

    def set_aside(self, job: Job) -> None:
        """Keep a job out of the order until it is pushed; no-op if it is buffered."""
        if job not in self._aside and (rank := self.lift(job)) is not None:
            self._aside[job] = rank

    def rank_of(self, job: Job) -> Rank | None:
        """The rank of a job that is in the heap or aside; None if it is buffered."""
        if job in self.buffer:
            return None
        return self._aside[job] if job in self._aside else self._heap.key(job)

    def is_aside(self, job: Job) -> bool:
        """Whether a job is kept out of the order."""
        return job in self._aside

    def peek(self) -> tuple[Rank, Job] | None:
        """The best job of heap and buffer with its rank, or None."""
        head = self._heap.first()
        if not self.buffer:
            return head
        oldest = next(iter(self.buffer))
        rank = self._rules.default_rank(oldest)
        return (rank, oldest) if head is None or rank < head[0] else head

    def ordered(self) -> Iterator[tuple[Rank, Job]]:
        """The jobs by rank, lazily; the queue must not change during the iteration."""
        ranked = self._heap.ordered()
        if not self.buffer:
            return ranked
        buffered = ((self._rules.default_rank(job), job) for job in self.buffer)
        return heapq.merge(ranked, buffered, key=itemgetter(0))


class LevelQueue:
    """All waiting jobs of one level, in one queue or one per tenant."""

    def __init__(self, rules: OrderingRules) -> None:
        self._rules = rules
        self._by_tenant = rules.by_tenant
        self._queues: dict[str, TenantQueue] = {}
        self.counters = VirtualCounters()  # service by tenant
        self.overdue: AddressableHeap[Job] = AddressableHeap()  # by arrival

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def buffered(self) -> int:
        """Jobs in the buffers of all tenants. O(tenants)."""
        return sum(len(queue.buffer) for queue in self._queues.values())

    def is_buffered(self, job: Job) -> bool:
        """Whether a job is in its tenant's buffer. Raises KeyError if the tenant has none here."""
        return job in self._queues[self.tenant_of(job)].buffer

    def push(self, job: Job, rank: Rank) -> bool:
        """Queue a job, or move it to its new rank; whether `peek` may change."""
        queue = self._queues.get(job.tenant if self._by_tenant else ANONYMOUS)
        if queue is None:
            queue = self._add_queue(job)
        head_changed = queue.push(job, rank)
        if job.credit is not None and job.overdue:
            self.overdue.push(job, job.sequence)
            return True
        return head_changed

    def buffer(self, job: Job) -> None:
        """Append a new job without a prediction to its tenant's buffer."""
        queue = self._queues.get(self.tenant_of(job))
        if queue is None:
            queue = self._add_queue(job)
        queue.buffer[job] = None

    def remove(self, job: Job) -> None:
        """Remove a job of this level. Raises KeyError if its tenant has no job here."""
        tenant = self.tenant_of(job)
        queue = self._queues[tenant]
        queue.remove(job)
        self.overdue.discard(job)
        if not len(queue):
            del self._queues[tenant]
            if self._by_tenant:
                self.counters.leave(tenant)

    def lift(self, job: Job) -> Rank | None:
        """See `TenantQueue.lift`; the tenant keeps its turn."""
        rank = self._queues[self.tenant_of(job)].lift(job)
        if rank is not None:
            self.overdue.discard(job)
        return rank

    def set_aside(self, job: Job) -> None:
        """See `TenantQueue.set_aside`."""
        self._queues[self.tenant_of(job)].set_aside(job)
        if self.is_aside(job):
            self.overdue.discard(job)

    def is_aside(self, job: Job) -> bool:
        """Whether a job of this level is kept out of the order."""
        return self._queues[self.tenant_of(job)].is_aside(job)

    def rank_of(self, job: Job) -> Rank | None:
        """See `TenantQueue.rank_of`."""
        return self._queues[self.tenant_of(job)].rank_of(job)

    def peek(self) -> tuple[Rank, Job] | None:
        """The next job and its rank, or None; tenants that may not go are skipped."""
        if not self._by_tenant:
            return self._queues[ANONYMOUS].peek() if self._queues else None
        for _, tenant in self.counters.ordered():
            head = self._queues[tenant].peek()
            if head is not None and self._rules.limits.admits_tenant(head[1]):
                return head
        return None

    def limited(self) -> Iterator[str | None]:
        """Tenants that their cap keeps from going now, up to the one that goes. None alone: a
        reservation keeps all."""
        head = self.peek()
        if head is not None and not self._rules.admits(head[1]):
            yield None
            return
        for _, tenant in self.counters.ordered() if self._by_tenant else ():
            first = self._queues[tenant].peek()
            if first is None or self._rules.limits.admits_tenant(first[1]):
                return
            yield tenant

    def ordered(self) -> Iterator[tuple[Rank, Job]]:
        """The jobs in the order in which they would run if nothing else happened, lazily."""
        if len(self._queues) == 1:
            return next(iter(self._queues.values())).ordered()
        return self._in_turns()

    def _in_turns(self) -> Iterator[tuple[Rank, Job]]:
        queues: dict[str, Iterator[tuple[Rank, Job]]] = {}
        turns: list[tuple[float, int, str]] = []
        tenants = self.counters.ordered()
        upcoming = next(tenants, None)
        while turns or upcoming is not None:
            while upcoming is not None and (not turns or upcoming[0] <= turns[0][0]):
                counter, tenant = upcoming
                heapq.heappush(turns, (counter, len(queues), tenant))
                queues[tenant] = self._queues[tenant].ordered()
                upcoming = next(tenants, None)
            counter, place, tenant = heapq.heappop(turns)
            head = next(queues[tenant], None)
            if head is not None:
                yield head
                heapq.heappush(
                    turns, (counter + self._rules.admission_seconds(head[1]), place, tenant)
                )

    def tenant_of(self, job: Job) -> str:
        """Key of a job's queue; `ANONYMOUS` for all jobs of a level without queues by tenant."""
        return job.tenant if self._by_tenant else ANONYMOUS

    def _add_queue(self, job: Job) -> TenantQueue:
        """Add the queue of a job's tenant."""
        tenant = self.tenant_of(job)
        queue = self._queues[tenant] = TenantQueue(self._rules)
        if self._by_tenant:
            self.counters.enter(tenant)
        return queue
