"""What happens when more comes in than can be served: the decisions in one place, as the engine
and the simulator call them.

Nothing here ends a request: calls return the jobs that must end and why, and the caller ends them.
Their ends come back through the lifecycle, like everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.job import Job, JobState
from vllm_semantic_sched.policy.lifecycle import Transition
from vllm_semantic_sched.policy.overload.account import Entry, QueueAccount
from vllm_semantic_sched.policy.overload.admission import ADMITTED, Verdict, fits, over_share
from vllm_semantic_sched.policy.overload.dedup import DedupIndex
from vllm_semantic_sched.policy.overload.load import LoadMonitor
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

if TYPE_CHECKING:
    from vllm_semantic_sched.policy.core import SchedulingCore

Ending = tuple[Job, Refusal]

# Waiting jobs of shed tiers that may end in one step.
_SHED_AT_A_TIME = 64

_SHED = "Tier {tier!r} is shed until more urgent ones are well again"
_SUPERSEDED = "A newer request with the same dedup_key took its place"
_REPLACED = "The queue is full and a more urgent request came"


class OverloadControl:
    """Admission, deduplication, queue timeouts and shedding. A `lifecycle.Listener`.

    Args:
        core: jobs, policy and what is expected of jobs.
        seats: requests that can run at a time.
        kv_tokens: tokens that the KV cache holds.
        seed: of what is random, so that a run can be repeated.
    """

    def __init__(self, core: SchedulingCore, seats: int, kv_tokens: int, seed: int = 0) -> None:
        self._core = core
        self._random = Random(seed)
        self._dedup = DedupIndex()
        self.account = QueueAccount(core.policy.levels)
        self.load = LoadMonitor(core, self.account, seats, kv_tokens)

    # What the lifecycle tells

    def moved(self, transition: Transition) -> None:
        """See `lifecycle.Listener`."""
        job, before, state = transition.job, transition.before, transition.state
        if state is JobState.RUNNING:
            self.account.leave(job)
            self.load.runs(job)
        elif state.is_end:
            self.account.leave(job)
            self._dedup.discard(job)
            self.load.ended(job, transition.time, completed=state is JobState.COMPLETED)
        elif before is JobState.RUNNING:
            self.load.stops(job)

    def first_token(self, job: Job) -> None:
        """See `lifecycle.Listener`."""
        self.load.first_token(job)

    # What the caller asks

    def arrive(
        self,
        job: Job,
        now: float,
        free_seats: int,
        dedup_key: str | None = None,
        origin: str = "",
    ) -> list[Ending]:
        """A job has arrived and waits, unless it is among those returned.

        Args:
            free_seats: seats that nobody holds.
            dedup_key, origin: see `policy.overload.dedup`.
        """
        self.load.look(now)
        older = []
        if dedup_key is not None:
            older = self._dedup.older(job, dedup_key, origin, self._core.policy.dedup)
        endings = self._let_in(job, self._entry(job, now), free_seats, older)
        if dedup_key is not None and not any(ended is job for ended, _ in endings):
            self._dedup.add(job, dedup_key, origin)
        return endings

    def revised(self, job: Job, now: float, free_seats: int) -> list[Ending]:
        """What is expected of a job has changed. One that waits and has another level now is a
        newcomer to that tier."""
        if self.load.is_running(job):
            self.load.runs(job)
        old = self.account.leave(job)
        if old is None:
            return []
        entry = self._entry(job, old.since)
        if entry.level != old.level:
            self.load.look(now)
            return self._let_in(job, entry, free_seats, [])
        self.account.enter(job, entry, self._timeout(entry.level))
        return []

    def step(self, now: float, kv_use: float) -> list[Ending]:
        """The engine is about to arrange a step.

        Args:
            kv_use: share of the KV blocks in use.

        Returns:
            Jobs that have waited too long or are shed.
        """
        self.load.stepped(now, kv_use)
        self.load.look(now)
        return [*self._timed_out(now), *self._shed()]

    def retry_after(self, level: int) -> float:
        """Seconds after which a newcomer of a level may find room: the predicted time to serve
        what is before it, and up to a quarter more, so that not all come back at once."""
        seconds = self.load.drain_seconds(level) * self._random.uniform(1.0, 1.25)
        return min(max(1.0, seconds), self._core.policy.admission.max_retry_after)

    # Parts

    def _let_in(
        self, job: Job, entry: Entry, free_seats: int, older: Sequence[Job]
    ) -> list[Ending]:
        """`older` leave first, so that the newcomer may have their place; if it is refused all
        the same, they stay."""
        places = [(other, self.account.leave(other)) for other in older]
        verdict = self._judge(entry, free_seats)
        if verdict.code is not None:
            for other, place in places:
                if place is not None:
                    self.account.enter(other, place, self._timeout(place.level))
            return [(job, self._refusal(verdict.code, verdict.reason, entry.level))]
        endings = []
        for other in older:
            endings.append((other, self._refusal(Code.SUPERSEDED, _SUPERSEDED, other.level)))
        for other in verdict.replaced:
            self.account.leave(other)
            endings.append((other, self._refusal(Code.OVER_CAPACITY, _REPLACED, other.level)))
        self.account.enter(job, entry, self._timeout(entry.level))
        return endings

    def _judge(self, entry: Entry, free_seats: int) -> Verdict:
        rules, load = self._core.policy.admission, self.load
        if load.is_shed(entry.level):
            return Verdict(Code.SHED, _SHED.format(tier=load.tiers[entry.level].name))
        verdict = over_share(
            entry.level,
            load.outstanding(),
            rules,
            load.tiers,
            load.pressure.level,
            self._random,
        )
        if verdict is not ADMITTED:
            return verdict
        return fits(entry, self.account, rules, load.tiers, free_seats)

    def _timed_out(self, now: float) -> list[Ending]:
        endings = []
        for job in self.account.overdue(now):
            self.account.leave(job)
            reason = f"No seat within {now - job.arrival:.1f} s"
            endings.append((job, self._refusal(Code.QUEUE_TIMEOUT, reason, job.level)))
        return endings

    def _shed(self) -> list[Ending]:
        """Waiting jobs of shed tiers, if they are to end, some at a time."""
        endings: list[Ending] = []
        if not self.load.shedder.stage or self._core.policy.shedding.waiting == "keep":
            return endings
        for level, tier in enumerate(self.load.tiers):
            while (
                self.load.is_shed(level)
                and len(endings) < _SHED_AT_A_TIME
                and (job := self.account.oldest(level)) is not None
            ):
                self.account.leave(job)
                reason = _SHED.format(tier=tier.name)
                endings.append((job, self._refusal(Code.SHED, reason, level)))
        return endings

    def _timeout(self, level: int) -> float | None:
        tier = self.load.tiers[level]
        return tier.queue.timeout or self._core.policy.admission.queue.timeout

    def _entry(self, job: Job, since: float) -> Entry:
        tokens = job.prompt_tokens + self._core.expected_output(job)
        return Entry(job.level, tokens, job.tenant, since)

    def _refusal(self, code: Code, reason: str, level: int) -> Refusal:
        return Refusal(code, reason, self.retry_after(level))
