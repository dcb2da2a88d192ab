"""Decisions under overload: admission, deduplication, queue timeouts and shedding. Calls return the
jobs that must end; `step.py` makes the engine end them, and the lifecycle reports their ends back.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Draft, Job, JobState, LevelSource
from vllm_semantic_sched.policy.limits import Limits
from vllm_semantic_sched.policy.overload.account import Entry
from vllm_semantic_sched.policy.overload.admission import SHED, admits_all, judge
from vllm_semantic_sched.policy.overload.deadline import Claim, not_kept
from vllm_semantic_sched.policy.overload.dedup import DedupIndex
from vllm_semantic_sched.policy.overload.load import LoadMonitor
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition

Ended = tuple[Job, Refusal]

_new_tuple = tuple.__new__

_LONGEST_RETRY = 60.0  # seconds of Retry-After
_SHED_AT_A_TIME = 64  # most waiting jobs of shed tiers that end in one step
_SUPERSEDED = "A newer request with the same dedup_key took its place"
_REPLACED = "The queue is full and a more urgent request came"


class OverloadControl(Listener):
    """Decides which requests are admitted and which end. `seed`: of its random decisions."""

    def __init__(
        self,
        ref: PolicyRef,
        estimates: Estimator,
        limits: Limits,
        capacity: EngineCapacity,
        seed: int,
    ) -> None:
        self._estimates = estimates
        self._random = Random(seed)
        self.dedup = DedupIndex()
        self.load = LoadMonitor(ref, estimates, limits, capacity)
        self.account = self.load.account
        self._ref = ref
        # Whether the policy admits every request without a dedup key.
        self.admits_all = Derived(ref, admits_all)
        self._timeouts = Derived(ref, _timeouts)

    # Lifecycle events, see `Listener`; time held counts neither as waiting nor as load

    def moved(self, transition: Transition) -> None:
        """Keep the queue account, the dedup index and the load up to date."""
        job, state = transition.job, transition.state
        if state is JobState.RUNNING:
            self.account.leave(job)
            self.load.runs(job)
        elif state.is_end:
            self.account.leave(job)
            if job in self.dedup.keys:
                self.dedup.discard(job)
            self.load.ended(job, transition.time, completed=state is JobState.COMPLETED)

    def first_token(self, job: Job) -> None:
        """Record the time to first token."""
        self.load.first_token(job)

    # Decisions

    def enter(self, job: Job) -> None:
        """Admit a new job without a dedup key under a policy that `admits_all`."""
        entry = self._entry(job, job.arrival, job.draft)
        self.account.enter(job, entry, self._timeout(job, entry.level))

    def admit(
        self,
        job: Job,
        now: float,
        free_seats: Callable[[], int],
        dedup_key: str | None = None,
        origin: str = "",
    ) -> list[Ended]:
        """Admit or refuse a new job; it waits unless it is among the jobs returned. `free_seats` is
        asked only if the policy can refuse; `dedup_key`, `origin`: see `dedup`."""
        if dedup_key is None and self.admits_all.table:
            self.enter(job)
            return []
        entry = self._entry(job, now, job.draft)
        self.load.look(now)
        if dedup_key is None:
            return self._let_in(job, entry, now, free_seats(), [])
        older = self.dedup.older(job, dedup_key, origin, self._ref.policy.dedup)
        ended = self._let_in(job, entry, now, free_seats(), older)
        if all(other is not job for other, _ in ended):
            self.dedup.add(job, dedup_key, origin)
        return ended

    def revised(self, job: Job, now: float, free_seats: Callable[[], int]) -> list[Ended]:
        """Update a job whose estimates have changed. A waiting job with another level is judged
        like a new request of that tier."""
        if job.state is JobState.RUNNING:
            self.load.runs(job)
        old = self.account.leave(job)
        if old is None:
            return []
        entry = self._entry(job, old.since)
        if entry.level != old.level:
            self.load.look(now)
            if not self.admits_all.table or self.load.shedder.stage:
                return self._let_in(job, entry, now, free_seats(), [])
        ended = self._give_up(job, entry, now, free_seats)
        self.account.enter(job, entry, self._timeout(job, entry.level))
        return self._left(ended)

    def reassigned(self, job: Job) -> None:
        """Update a job whose level an operator has set. Unlike in `revised`, a waiting one stays:
        the bounds on the queue of its new tier do not end it."""
        if job.state is JobState.RUNNING:
            self.load.runs(job)
        old = self.account.leave(job)
        if old is not None:
            entry = self._entry(job, old.since)
            self.account.enter(job, entry, self._timeout(job, entry.level))

    def step(self, now: float, kv_use: float) -> list[Ended]:
        """Begin an engine step; returns jobs that have waited too long or are shed."""
        self.load.stepped(now, kv_use)
        self.load.look(now)
        ended = []
        for job in self.account.timed_out(now):
            reason = f"No seat within {now - job.arrival:.1f} s"
            ended.append(self._end(job, job.level, Code.QUEUE_TIMEOUT, reason))
        return ended + self._shed()

    def retry_after(self, level: int) -> float:
        """Seconds after which to retry: the predicted time to clear the work ahead of a new request
        of this level, and up to a quarter more, so that not all clients retry at once."""
        seconds = self.load.drain_seconds(level) * self._random.uniform(1.0, 1.25)
        return min(max(1.0, seconds), _LONGEST_RETRY)

    def _let_in(
        self, job: Job, entry: Entry, now: float, free_seats: int, older: Sequence[Job]
    ) -> list[Ended]:
        """Admit or refuse a job in place of `older` jobs, which stay if it is refused."""
        places = [(other, self.account.leave(other)) for other in older]
        verdict = judge(entry, self.load, self._ref.policy, free_seats, self._random)
        if verdict.code is not None:
            given_up = [self._end(job, entry.level, verdict.code, verdict.reason)]
        else:
            given_up = self._give_up(job, entry, now, lambda: free_seats)
        refused = [end for end in given_up if end[0] is job]
        if refused:
            for other, place in places:
                if place is not None:
                    self.account.enter(other, place, self._timeout(other, place.level))
            return refused
        ended = self._left(given_up)
        ended += [
            self._end(other, other.level, Code.SUPERSEDED, _SUPERSEDED, job) for other in older
        ]
        if (replaced := verdict.replaced) is not None:
            ended.append(self._end(replaced, replaced.level, Code.OVER_CAPACITY, _REPLACED, job))
        self.account.enter(job, entry, self._timeout(job, entry.level))
        return ended

    def _left(self, ended: list[Ended]) -> list[Ended]:
        """Jobs that end, once they are not counted as waiting any more."""
        for job, _ in ended:
            self.account.leave(job)
        return ended

    def _shed(self) -> list[Ended]:
        """Waiting jobs of shed tiers that end in this step, if the policy says so."""
        ended: list[Ended] = []
        if not self.load.shedder.stage or self._ref.policy.shedding.waiting == "keep":
            return ended
        for level in filter(self.load.is_shed, range(self._ref.policy.levels)):
            reason = SHED.format(tier=self.load.tiers[level].name)
            while len(ended) < _SHED_AT_A_TIME and (job := self.account.oldest(level)) is not None:
                ended.append(self._end(job, level, Code.SHED, reason))
        return ended

    def _give_up(
        self, job: Job, entry: Entry, now: float, free_seats: Callable[[], int]
    ) -> list[Ended]:
        """The refusals of jobs whose deadline cannot be kept: the new one's, or those of longer
        ones that wait at its level. The most urgent level is exempt, and a job whose level is not
        known yet stays: it may be urgent, and wait less than it seems."""
        if entry.level == 0 or entry.start_by == math.inf:
            return []
        free_at = now + self._wait_beside(entry.level, free_seats())
        claims = [Claim(entry.tokens, entry.start_by, job)]
        for other, place in self.account.entries[entry.level].items():
            if place.start_by < math.inf:
                claims.append(Claim(place.tokens, place.start_by, other))
        given_up = not_kept(claims, free_at, self.load.least_seconds(1.0))
        work = sum(claim.tokens for claim in claims) - sum(claim.tokens for claim in given_up)
        start = free_at + self.load.least_seconds(work)  # after all that are kept
        return [
            (claim.job, self._missed_deadline(claim.job, start - claim.start_by))
            for claim in given_up
        ]

    def _wait_beside(self, level: int, free_seats: int) -> float:
        """Predicted seconds until the first of a level's waiting jobs gets a seat: the work that is
        more urgent, and that of one seat until it comes free."""
        allocations = self.load.allocations
        if allocations.all.queued < free_seats:
            return 0.0
        ahead = sum(held.queued_tokens for held in allocations.levels[:level])
        running = sum(held.tokens for held in allocations.levels)
        return self.load.least_seconds(ahead + running / max(1, len(allocations)))

    def _missed_deadline(self, job: Job, late: float) -> Refusal:
        """The refusal of a job whose answer would come so many seconds after its deadline."""
        deadline = job.deadlines.answer or 0.0
        needed = deadline + max(0.0, late)
        reason = f"No answer within {deadline:.1f} s: it would take about {needed:.1f} s"
        return Refusal(
            Code.DEADLINE,
            reason,
            min(max(1.0, late), _LONGEST_RETRY),
            deadline_ms=math.ceil(needed * 1000),
        )

    def _timeout(self, job: Job, level: int) -> float | None:
        """Seconds from its arrival after which a waiting job is refused; None: never. One whose
        level an operator has set may wait as long as any tier allows: a tier with a short timeout
        must not end what was raised to it."""
        timeout = self._timeouts.table[level]
        if job.level_source is LevelSource.OPERATOR:
            timeout = _longest(self._timeouts.table)
        timeouts = [timeout, job.patience]
        if self._ref.policy.deadlines.stated:
            timeouts.append(job.deadlines.answer)
        return min((timeout for timeout in timeouts if timeout is not None), default=None)

    def _entry(self, job: Job, since: float, draft: Draft | None = None) -> Entry:
        level = job.level
        if job.level_unread:
            # A misread emergency must not be refused before the predictor has read it.
            level = min(level, self._ref.policy.default_level)
        tokens = self._estimates.tokens(job) if draft is None else draft.tokens
        deadline, start_by = job.deadlines.answer, math.inf
        if deadline is not None and self._ref.policy.deadlines.stated and not job.level_unread:
            answer = self._estimates.answer_seconds(job, self.load.step_seconds)
            start_by = job.arrival + deadline - answer
        # Half the time of Entry().
        return _new_tuple(Entry, (level, tokens, job.tenant, since, start_by))

    def _end(
        self, job: Job, level: int, code: Code, reason: str, beneficiary: Job | None = None
    ) -> Ended:
        self.account.leave(job)
        return job, Refusal(code, reason, self.retry_after(level), beneficiary)


def _longest(timeouts: Sequence[float | None]) -> float | None:
    """The longest of some timeouts; None: never."""
    seconds = [timeout for timeout in timeouts if timeout is not None]
    return max(seconds) if len(seconds) == len(timeouts) else None


def _timeouts(policy: Policy) -> Sequence[float | None]:
    """Seconds after which a waiting request of each level is refused; None: never."""
    every = policy.admission.queue.timeout
    return [tier.queue.timeout or every for tier in policy.all_tiers]
