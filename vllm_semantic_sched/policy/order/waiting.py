"""The waiting queue, which chooses among the queues of the levels."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator
from operator import itemgetter

from vllm_semantic_sched.policy.config.order import STRICT_LEVEL
from vllm_semantic_sched.policy.facts.job import Job, Rank
from vllm_semantic_sched.policy.order.queues import LevelQueue, OrderingRules

_new_tuple = tuple.__new__


class WaitingQueue:
    """Jobs without a seat. All operations are O(log n + levels).

    Within a level jobs are ordered by tenant and rank, under frozen keys. Offsets and limits, which
    change from step to step, apply when the first jobs of the levels are compared.
    """

    def __init__(self, rules: OrderingRules) -> None:
        self.rules = rules
        self.queues = defaultdict[int, LevelQueue](lambda: LevelQueue(rules))  # by level
        self._places: dict[Job, int] = {}
        self._next: tuple[Job | None, bool] | None = None  # the cached choice

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, job: object) -> bool:
        return job in self._places

    def __iter__(self) -> Iterator[Job]:
        return iter(self._places)

    @property
    def buffered(self) -> int:
        """Jobs that wait without a prediction, in buffers. O(tenants)."""
        return sum(queue.buffered for queue in self.queues.values())

    @property
    def levels(self) -> list[int]:
        """Levels with waiting jobs, most urgent first."""
        return sorted(level for level, queue in self.queues.items() if queue)

    def buffer(self, job: Job) -> None:
        """Append a new job without a prediction to the buffer of its level."""
        self._next = None
        self._places[job] = job.level
        self.queues[job.level].buffer(job)

    def push(self, job: Job, rank: Rank) -> None:
        """Queue a job by rank, or move it to its new rank."""
        self._next = None
        place = self._places.get(job)
        if place is not None and place != job.level:
            self.queues[place].remove(job)
        self.add(job, rank)

    def add(self, job: Job, rank: Rank) -> None:
        """Queue a new job by rank; the cached choice stays unless it is the first of its level."""
        self._places[job] = job.level
        if self.queues[job.level].push(job, rank):
            self._next = None

    def rerank(self, job: Job, rank: Rank) -> None:
        """Give a queued job a new rank; a buffered one stays buffered unless its level changed."""
        if self.queues[self._places[job]].is_buffered(job):
            if self._places[job] == job.level:
                return
            rank = self.rules.default_rank(job)
        self.push(job, rank)

    def remove(self, job: Job) -> bool:
        """Remove a job; False if it is not queued."""
        place = self._places.pop(job, None)
        if place is None:
            return False
        self._next = None
        self.queues[place].remove(job)
        return True

    def lift(self, job: Job) -> Rank | None:
        """Remove a job that returns within the same step, with `add`; its rank for that. None, with
        no effect, if it is buffered."""
        rank = self.queues[self._places[job]].lift(job)
        if rank is not None:
            del self._places[job]
            self._next = None
        return rank

    def set_aside(self, job: Job) -> bool:
        """Keep a queued job out of `peek` and `ordered`, until `recall` or until it gets another
        rank. False, with no effect, if it is buffered or not queued."""
        place = self._places.get(job)
        if place is None:
            return False
        queue = self.queues[place]
        queue.set_aside(job)
        self._next = None
        return queue.is_aside(job)

    def recall(self, job: Job) -> bool:
        """Put a job back at its rank; False if it was not set aside."""
        place = self._places.get(job)
        if place is None or not self.queues[place].is_aside(job):
            return False
        rank = self.queues[place].rank_of(job)
        assert rank is not None
        self.add(job, rank)
        return True

    def is_aside(self, job: Job) -> bool:
        """Whether a job is queued and kept out of the order."""
        place = self._places.get(job)
        return place is not None and self.queues[place].is_aside(job)

    def rank_of(self, job: Job) -> Rank | None:
        """The rank under which a job is queued; None if it is buffered or not queued."""
        place = self._places.get(job)
        return None if place is None else self.queues[place].rank_of(job)

    def changed(self) -> None:
        """Forget the cached choice, because offsets or limits may have changed."""
        self._next = None

    def peek(self) -> Job | None:
        """The job that runs next; None if no waiting job may have a seat now."""
        return self._choose()[0]

    def overtakes(self, job: Job) -> bool:
        """Whether `job`, the result of `peek`, is next only because of its age."""
        chosen, overtakes = self._choose()
        return overtakes and chosen is job

    def ordered(self) -> Iterator[Job]:
        """The jobs in the order in which they would run if all got seats and nothing else
        happened, lazily: first the result of `peek`. The queue must not change meanwhile."""
        first = self.peek()
        if first is not None:
            yield first
            if len(self) == 1:
                return
        levels = [
            ((self._key(rank, job), job) for rank, job in queue.ordered())
            for queue in self.queues.values()
            if queue
        ]
        for _, job in heapq.merge(*levels, key=itemgetter(0)) if len(levels) != 1 else levels[0]:
            if job is not first:
                yield job

    def heads(self, count: int) -> list[Job]:
        """Up to so many jobs of each level in the order of their ranks, without buffered ones."""
        jobs = []
        for queue in self.queues.values():
            first = itertools.islice(queue.ordered(), count)
            jobs += [job for _, job in first if not queue.is_buffered(job)]
        return jobs

    def limited(self) -> Iterator[tuple[int, str | None]]:
        """Levels and tenants that a limit keeps from starting; None: all of a level."""
        if self.rules.has_limits:
            for level, queue in self.queues.items():
                for tenant in queue.limited():
                    yield level, tenant

    def _choose(self) -> tuple[Job | None, bool]:
        if self._next is None:
            job, overtakes = self._choose_anew()
            # While the next job does not fit, none starts, or small ones would pass it for ever.
            rules = self.rules
            fits = job is not None and (not rules.used.table.kv_peak or rules.kv_peak.admits(job))
            self._next = (job, overtakes) if fits else (None, False)
        return self._next

    def _choose_anew(self) -> tuple[Job | None, bool]:
        if not self._places:
            return None, False
        admits = self.rules.admits
        heads = self._heads()
        first = self._best(heads)
        if not self.rules.used.table.aging or not self.rules.overtaking.allowed:
            return first, False
        overdue = (queue.overdue.peek() for queue in self.queues.values())
        aged = min(filter(None, overdue), key=lambda job: job.sequence, default=None)
        if aged is None:
            aged = self._best(heads, aged=True)
        elif not admits(aged):
            aged = None  # nor does another job overtake, so that it gets the next seat
        overtakes = aged is not None and aged is not first
        return (aged if overtakes else first), overtakes

    def _heads(self) -> list[tuple[Rank, Job]]:
        """The first job of each level, as far as limits allow. What a hard reservation leaves is
        for the most urgent: behind a job for which it is not enough nobody less urgent starts."""
        rules, heads = self.rules, []
        if not rules.has_limits:
            return [head for queue in self.queues.values() if (head := queue.peek()) is not None]
        for level in sorted(self.queues):
            head = self.queues[level].peek()
            if head is None:
                continue
            if rules.admits(head[1]):
                heads.append(head)
            elif not rules.reserves_admit(head[1]):
                break
        return heads

    def _best(self, heads: list[tuple[Rank, Job]], aged: bool = False) -> Job | None:
        if len(heads) == 1:
            return heads[0][1]
        # Keys differ in the sequence number, so that jobs are not compared.
        return min([(self._key(rank, job, aged), job) for rank, job in heads])[1] if heads else None

    def _key(self, rank: Rank, job: Job, aged: bool = False) -> Rank:
        level = (
            rank.level + self.rules.fair_share.offsets[job.level] if aged else self.level_of(job)
        )
        if level != rank.level:
            rank = _new_tuple(Rank, (level, *rank[1:]))  # half the time of Rank()
        # Less urgent levels form one: the remaining time of a job there counts `factor` times as
        # much per level (Smith's rule: shortest first, by time / weight).
        factor, first = self.rules.ref.policy.weighted_levels.factor, STRICT_LEVEL + 1
        if factor is None or rank.level <= STRICT_LEVEL:
            return rank
        return Rank(first, rank.remaining * factor ** (rank.level - first), rank.sequence)

    def level_of(self, job: Job) -> float:
        """Level of a waiting job among the others, without what it gained by its age."""
        level = job.deadline_level if self.rules.by_level else 0.0
        return level + self.rules.fair_share.offsets[job.level]
