"""Decisions under overload: admission, deduplication, queue timeouts and shedding. Calls return the
jobs that must end; `step.py` makes the engine end them, and the lifecycle reports their ends back.
"""

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
            return self._let_in(job, entry, free_seats(), [])
        older = self.dedup.older(job, dedup_key, origin, self._ref.policy.dedup)
        ended = self._let_in(job, entry, free_seats(), older)
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
                return self._let_in(job, entry, free_seats(), [])
        self.account.enter(job, entry, self._timeout(job, entry.level))
        return []

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

    def _let_in(self, job: Job, entry: Entry, free_seats: int, older: Sequence[Job]) -> list[Ended]:
        """Admit or refuse a job in place of `older` jobs, which stay if it is refused."""
        places = [(other, self.account.leave(other)) for other in older]
        verdict = judge(entry, self.load, self._ref.policy, free_seats, self._random)
        if verdict.code is not None:
            for other, place in places:
                if place is not None:
                    self.account.enter(other, place, self._timeout(other, place.level))
            return [self._end(job, entry.level, verdict.code, verdict.reason)]
        ended = [
            self._end(other, other.level, Code.SUPERSEDED, _SUPERSEDED, job) for other in older
        ]
        if (replaced := verdict.replaced) is not None:
            ended.append(self._end(replaced, replaced.level, Code.OVER_CAPACITY, _REPLACED, job))
        self.account.enter(job, entry, self._timeout(job, entry.level))
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

    def _timeout(self, job: Job, level: int) -> float | None:
        """Seconds from its arrival after which a waiting job is refused; None: never. One whose
        level an operator has set may wait as long as any tier allows: a tier with a short timeout
        must not end what was raised to it."""
        timeout = self._timeouts.table[level]
        if job.level_source is LevelSource.OPERATOR:
            timeout = _longest(self._timeouts.table)
        if job.patience is None:
            return timeout
        return job.patience if timeout is None else min(timeout, job.patience)

    def _entry(self, job: Job, since: float, draft: Draft | None = None) -> Entry:
        level = job.level
        if job.level_unread:
            # A misread emergency must not be refused before the predictor has read it.
            level = min(level, self._ref.policy.default_level)
        tokens = self._estimates.tokens(job) if draft is None else draft.tokens
        return _new_tuple(Entry, (level, tokens, job.tenant, since))  # half the time of Entry()

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
