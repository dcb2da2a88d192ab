"""Every state change of a job (`facts/job.py`) goes through `Lifecycle`, which stamps and counts it
and notifies the listeners: overload control, metrics, event log."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import LEGAL_MOVES, Job, JobState
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.record.waits import Part, WaitLedger

NOTHING: Mapping[str, Any] = MappingProxyType({})


class IllegalTransition(RuntimeError):
    """The state machine has no edge between two states."""


class Transition(NamedTuple):
    """A change of state."""

    job: Job
    before: JobState | None  # None: it has just arrived
    state: JobState
    time: float  # seconds on the policy's clock
    reason: str = ""  # one of a fixed set of words; empty if the states explain the change
    plan: str = ""  # kind of plan for a preempted job's KV
    beneficiary: Job | None = None  # the job that it was preempted or ended for
    waited: Iterable[Part] = ()  # causes of the wait that is over, if logged
    decision: Mapping[str, Any] = NOTHING  # what decided a new job's level, if logged


class Listener:
    """Receives state changes; ignores them here. Must not raise, block or change a job."""

    def moved(self, transition: Transition) -> None:
        """Called when a job arrived or changed state."""

    def first_token(self, job: Job) -> None:
        """Called after a job's first token, at the time `job.first_token`."""

    def held(self, job: Job, seconds: float) -> None:
        """Called when a running job was held for this long and gets tokens again, or ends."""

    def noted(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        """Called on the journal alone, for what is no change of state: `read` (a prediction came;
        `rule`, `urgency` with the probabilities, `level_before`), `operator` (set the level;
        `level_before`, `by`, `why`) and `restored` (seconds until a preempted job had its KV
        again)."""


# By method of `Listener`: the code of the task that an error interrupts.
_TASKS = {
    "moved": "transition_record",
    "first_token": "first_token_record",
    "held": "hold_record",
    "noted": "decision_record",
}


class _Waiting:
    """Jobs of one level that wait for a seat."""

    def __init__(self) -> None:
        self.in_order: dict[Job, None] = {}  # entered at this level, as most did, oldest first
        self.moved: AddressableHeap[Job] = AddressableHeap()  # came from another level

    def __len__(self) -> int:
        return len(self.in_order) + len(self.moved)

    @property
    def oldest(self) -> Job | None:
        first = next(iter(self.in_order), None)
        moved = self.moved.peek()
        if first is None:
            return moved
        if moved is None:
            return first
        return min(first, moved, key=lambda job: job.entered)

    def discard(self, job: Job) -> bool:
        """Remove a job; False if it was not there."""
        if job in self.in_order:
            del self.in_order[job]
            return True
        return self.moved.discard(job)


class Lifecycle:
    """Moves jobs through their states. O(log n) per move.

    Args:
        clock: seconds, the same clock as that of `Job.arrival`.
        on_error: told, inside the except block, the code of what failed in a listener; None: errors
            are raised.
    """

    def __init__(
        self, clock: Callable[[], float], on_error: Callable[[str], None] | None = None
    ) -> None:
        self.listeners: list[Listener] = []
        # Not told of arrivals, which happen between two steps and have to be cheap.
        self.later_listeners: list[Listener] = []
        self.starting: dict[Job, None] = {}  # have had a seat but no token yet
        self.journal: Listener | None = None  # None: nobody asks why
        self.waits: WaitLedger | None = None  # set with it
        self.clock = clock
        self._on_error = on_error
        self._waiting: defaultdict[int, _Waiting] = defaultdict(_Waiting)

    def arrive(self, job: Job, decision: Mapping[str, Any] = NOTHING) -> None:
        """Record that a new job waits."""
        job.entered = job.arrival
        self._waiting[job.level].in_order[job] = None
        if self.waits is not None:
            job.wait = self.waits.begin(job.level, job.tenant)
        if self.listeners:
            transition = Transition(
                job, before=None, state=job.state, time=job.arrival, decision=decision
            )
            self._tell(self.listeners, "moved", transition)

    def move(
        self,
        job: Job,
        state: JobState,
        reason: str = "",
        plan: str = "",
        beneficiary: Job | None = None,
    ) -> None:
        """Change a job's state; IllegalTransition, with no effect, if there is no such edge."""
        before = job.state
        now = self.clock()
        if state not in LEGAL_MOVES[before]:
            raise IllegalTransition(f"request {job.request_id}: {before.value} -> {state.value}")
        if before is not JobState.RUNNING:
            job.waited += now - job.entered
            self._waiting[job.level].discard(job)
        job.state = state
        job.entered = now
        waited: Iterable[Part] = ()
        queued = state is JobState.WAITING or state is JobState.SWAPPED
        if self.waits is not None:
            if job.wait is not None:
                waited = self.waits.end(job.wait)
            job.wait = self.waits.begin(job.level, job.tenant) if queued else None
        if state is JobState.RUNNING:
            if job.started is None:
                job.started = now
            if job.first_token is None:
                self.starting[job] = None
        elif queued:
            self._waiting[job.level].in_order[job] = None
        else:
            self.starting.pop(job, None)
        if self.listeners or self.later_listeners:
            transition = Transition(
                job,
                before=before,
                state=state,
                time=now,
                reason=reason,
                plan=plan,
                beneficiary=beneficiary,
                waited=waited,
            )
            self._tell_all("moved", transition)

    def first_token(self, job: Job) -> None:
        """Record the time of a job's first token."""
        if job.first_token is None:
            self.starting.pop(job, None)
            job.first_token = self.clock()
            self._tell_all("first_token", job)

    def held(self, job: Job, seconds: float) -> None:
        """See `Listener.held`."""
        self._tell_all("held", job, seconds)

    def note(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        """See `Listener.noted`."""
        if self.journal is not None:
            self._tell((self.journal,), "noted", job, what, details)

    def relevel(self, job: Job, before: int, unread: bool = False) -> None:
        """Move a waiting job from level `before` to `job.level`; `unread`: that its text had not
        been read has kept it waiting."""
        if self._waiting[before].discard(job):
            self._waiting[job.level].moved.push(job, (job.entered, job.sequence))
        if job.wait is not None and self.waits is not None:
            job.wait.level = job.level
            self.waits.split(job.wait, cause=Cause.UNREAD if unread else None)

    def waiting(self, level: int) -> int:
        """Number of jobs of a level that wait for a seat, swapped ones included."""
        return len(self._waiting[level])

    def longest_wait(self, level: int) -> float:
        """Seconds that the oldest waiting job of a level has been without a seat; 0 without any."""
        oldest = self._waiting[level].oldest
        return 0.0 if oldest is None else max(0.0, self.clock() - oldest.entered)

    def _tell_all(self, what: str, *details: Any) -> None:
        self._tell((*self.listeners, *self.later_listeners), what, *details)

    def _tell(self, listeners: Iterable[Listener], what: str, *details: Any) -> None:
        for listener in listeners:
            try:
                getattr(listener, what)(*details)
            except Exception:
                if self._on_error is None:
                    raise
                self._on_error(_TASKS[what])
