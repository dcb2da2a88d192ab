"""State changes of jobs with their times, and how long jobs wait (O4, I1).

The state machine is the job's own (`facts/job.py`). Every change goes through here, so that it has
a time, is counted, and reaches the listeners: overload control, metrics, event log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job, JobState


class Transition(NamedTuple):
    """A job came from `before` (None: it has just arrived) into `state`.

    Attributes:
        time: seconds on the policy's clock.
        reason: why, in a word of a bounded vocabulary; empty where the states say it.
        plan: what happened to the KV of a preempted job; empty for all others.
    """

    job: Job
    before: JobState | None
    state: JobState
    time: float
    reason: str = ""
    plan: str = ""


class Listener(Protocol):
    """Is told of state changes. Must not raise, block, or change a job's state itself."""

    def moved(self, transition: Transition) -> None:
        """A job arrived or changed state."""

    def first_token(self, job: Job) -> None:
        """A job's first token is there; `job.first_token` is its time."""


class Lifecycle:
    """Moves jobs through their states. O(log n) per move.

    Args:
        clock: seconds; the one that `Job.arrival` is read from.

    Attributes:
        listeners: told of every transition, after it.
        transitions: how often each edge (before, after) was taken.
        starting: jobs that have had a seat and no token yet.
        clock: as given.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listeners: list[Listener] = []
        self.transitions: Counter[tuple[JobState | None, JobState]] = Counter()
        self.starting: dict[Job, None] = {}
        self.clock = clock
        self._waiting: dict[int, AddressableHeap[Job]] = {}

    def arrive(self, job: Job) -> None:
        """A new job waits."""
        job.entered = job.arrival
        self._push(job)
        self._tell(job, None, job.arrival)

    def move(self, job: Job, state: JobState, reason: str = "", plan: str = "") -> None:
        """Change a job's state; see `Transition` for the arguments.

        Raises:
            IllegalTransition: the state machine has no such edge; nothing has changed.
        """
        before, now = job.state, self.clock()
        job.move_to(state, now)
        if before is not JobState.RUNNING:
            self._heap(job.level).discard(job)
        if state in (JobState.WAITING, JobState.SWAPPED):
            self._push(job)
        if state is JobState.RUNNING and job.first_token is None:
            self.starting[job] = None
        elif state.is_end:
            self.starting.pop(job, None)
        self._tell(job, before, now, reason, plan)

    def first_token(self, job: Job) -> None:
        """A job's first token is there."""
        if job.first_token is None:
            self.starting.pop(job, None)
            job.first_token = self.clock()
            for listener in self.listeners:
                listener.first_token(job)

    def relevel(self, job: Job, before: int) -> None:
        """The level of a job was `before` and is `job.level` now."""
        if self._heap(before).discard(job):
            self._push(job)

    def waiting(self, level: int) -> int:
        """Jobs of a level that wait for a seat, wherever their KV is."""
        return len(self._waiting[level]) if level in self._waiting else 0

    def longest_wait(self, level: int) -> float:
        """Seconds for which the job of a level that waits longest has been without a seat, since
        it arrived or lost its seat; 0 if none waits."""
        oldest = self._waiting[level].peek() if level in self._waiting else None
        return 0.0 if oldest is None else max(0.0, self.clock() - oldest.entered)

    def _heap(self, level: int) -> AddressableHeap[Job]:
        heap = self._waiting.get(level)
        if heap is None:
            heap = self._waiting[level] = AddressableHeap()
        return heap

    def _push(self, job: Job) -> None:
        self._heap(job.level).push(job, (job.entered, job.sequence))

    def _tell(
        self, job: Job, before: JobState | None, now: float, reason: str = "", plan: str = ""
    ) -> None:
        self.transitions[before, job.state] += 1
        if self.listeners:
            transition = Transition(job, before, job.state, now, reason, plan)
            for listener in self.listeners:
                listener.moved(transition)
