"""Records state changes of jobs (`facts/job.py`) and waiting times.

Every state change goes through `Lifecycle`, which stamps and counts it and notifies the listeners:
overload control, metrics, event log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.waits import Cause, Part, WaitLedger

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Transition(NamedTuple):
    """A change from state `before` (None: the job has just arrived) to `state`.

    Attributes:
        time: seconds on the policy's clock.
        reason: one of a fixed set of words; empty if the states explain the change.
        plan: kind of plan for a preempted job's KV; else empty.
        beneficiary: the job that it was preempted or ended for.
        waited: causes of the wait that is over, if they are logged.
        decision: what decided the level of a new job, if that is logged (see `Journal.noted`).
    """

    job: Job
    before: JobState | None
    state: JobState
    time: float
    reason: str = ""
    plan: str = ""
    beneficiary: Job | None = None
    waited: Iterable[Part] = ()
    decision: Mapping[str, Any] = NOTHING


class Listener:
    """Receives state changes, and ignores them here. Must not raise, block, or change a job's
    state."""

    def moved(self, transition: Transition) -> None:
        """Called when a job arrived or changed state."""

    def first_token(self, job: Job) -> None:
        """Called after a job's first token, at the time `job.first_token`."""

    def held(self, job: Job, seconds: float) -> None:
        """Called when a running job was held for this long and gets tokens again, or ends."""


class Journal(Protocol):
    """Records why. Must not raise, block, or change a job."""

    def noted(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        """Called for what is no change of state: `read` (a prediction came; `rule`, `urgency` with
        the probabilities, `level_before`) and `restored` (`restored`: seconds until a preempted job
        had its KV again)."""


class _Waiting:
    """Jobs of one level that wait for a seat.

    Attributes:
        in_order: those that entered at this level, oldest first: most jobs, at the price of a dict.
        moved: those that came from another level.
    """

    __slots__ = ("in_order", "moved")

    def __init__(self) -> None:
        self.in_order: dict[Job, None] = {}
        self.moved: AddressableHeap[Job] = AddressableHeap()

    def __len__(self) -> int:
        return len(self.in_order) + len(self.moved)

    @property
    def oldest(self) -> Job | None:
        """The job that has waited longest; None without any."""
        first, moved = next(iter(self.in_order), None), self.moved.peek()
        if first is None or moved is None:
            return first or moved
        return min(first, moved, key=lambda job: job.entered)

    def discard(self, job: Job) -> bool:
        """Remove a job; False if it was not there."""
        return self.in_order.pop(job, self) is not self or self.moved.discard(job)


class Lifecycle:
    """Moves jobs through their states. O(log n) per move.

    Attributes:
        clock: seconds, the same clock as that of `Job.arrival`.
        listeners: called after every transition.
        later_listeners: called after every transition but arrivals, after `listeners`. An arrival
            happens between two steps and has to be cheap.
        starting: jobs that have had a seat but no token yet.
        journal: records why; None: nobody asks. `waits` is set with it.

    Args:
        on_error: told, inside the except block, what failed in a listener; None: errors are raised.
    """

    def __init__(
        self, clock: Callable[[], float], on_error: Callable[[str], None] | None = None
    ) -> None:
        self.listeners: list[Listener] = []
        self.later_listeners: list[Listener] = []
        self.starting: dict[Job, None] = {}
        self.journal: Journal | None = None
        self.waits: WaitLedger | None = None
        self.clock = clock
        self._on_error = on_error
        self._waiting: dict[int, _Waiting] = {}

    def arrive(self, job: Job, decision: Mapping[str, Any] = NOTHING) -> None:
        """Record that a new job waits."""
        job.entered = job.arrival
        waiting = self._waiting.get(job.level)
        if waiting is None:
            waiting = self._at(job.level)
        waiting.in_order[job] = None
        if self.waits is not None:
            job.wait = self.waits.begin(job.level, job.tenant)
        if self.listeners:
            transition = Transition(job, None, job.state, job.arrival, decision=decision)
            self._tell(self.listeners, transition)

    def move(
        self,
        job: Job,
        state: JobState,
        reason: str = "",
        plan: str = "",
        beneficiary: Job | None = None,
    ) -> None:
        """Change a job's state; see `Transition` for the arguments.

        Raises:
            IllegalTransition: no such edge; nothing has changed.
        """
        before, now = job.state, self.clock()
        job.move_to(state, now)
        if before is not JobState.RUNNING:
            self._at(job.level).discard(job)
        waited = self._follow_wait(job) if self.waits is not None else ()
        if state is JobState.RUNNING:
            if job.first_token is None:
                self.starting[job] = None
        elif state is JobState.WAITING or state is JobState.SWAPPED:
            self._at(job.level).in_order[job] = None
        else:
            self.starting.pop(job, None)
        if self.listeners or self.later_listeners:
            transition = Transition(job, before, state, now, reason, plan, beneficiary, waited)
            self._tell((*self.listeners, *self.later_listeners), transition)

    def first_token(self, job: Job) -> None:
        """Record the time of a job's first token."""
        if job.first_token is None:
            self.starting.pop(job, None)
            job.first_token = self.clock()
            for listener in (*self.listeners, *self.later_listeners):
                try:
                    listener.first_token(job)
                except Exception:
                    self._failed("recording a first token")

    def held(self, job: Job, seconds: float) -> None:
        """Record that a running job was held for this long."""
        for listener in (*self.listeners, *self.later_listeners):
            try:
                listener.held(job, seconds)
            except Exception:
                self._failed("recording a hold")

    def note(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        """See `Journal.noted`."""
        if self.journal is not None:
            try:
                self.journal.noted(job, what, details)
            except Exception:
                self._failed("recording a decision")

    def relevel(self, job: Job, before: int, unread: bool = False) -> None:
        """Move a waiting job from level `before` to `job.level`.

        Args:
            unread: that its text had not been read has kept it waiting.
        """
        if self._at(before).discard(job):
            self._at(job.level).moved.push(job, (job.entered, job.sequence))
        if job.wait is not None and self.waits is not None:
            job.wait.level = job.level
            self.waits.split(job.wait, Cause.UNREAD if unread else None)

    def waiting(self, level: int) -> int:
        """Number of jobs of a level that wait for a seat, swapped ones included."""
        waiting = self._waiting.get(level)
        return 0 if waiting is None else len(waiting)

    def longest_wait(self, level: int) -> float:
        """Longest time in seconds that a waiting job of a level has been without a seat; 0 if
        none waits."""
        oldest = self._waiting[level].oldest if level in self._waiting else None
        return 0.0 if oldest is None else max(0.0, self.clock() - oldest.entered)

    def _at(self, level: int) -> _Waiting:
        waiting = self._waiting.get(level)
        if waiting is None:
            waiting = self._waiting[level] = _Waiting()
        return waiting

    def _follow_wait(self, job: Job) -> Iterable[Part]:
        """The causes of the wait that is over, and the begin of the next one."""
        assert self.waits is not None
        waited: Iterable[Part] = () if job.wait is None else self.waits.end(job.wait)
        waits = job.state is JobState.WAITING or job.state is JobState.SWAPPED
        job.wait = self.waits.begin(job.level, job.tenant) if waits else None
        return waited

    def _tell(self, listeners: Iterable[Listener], transition: Transition) -> None:
        for listener in listeners:
            try:
                listener.moved(transition)
            except Exception:
                self._failed("recording a transition")

    def _failed(self, doing: str) -> None:
        if self._on_error is None:
            raise
        self._on_error(doing)
