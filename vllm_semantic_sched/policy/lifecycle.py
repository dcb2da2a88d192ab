"""What becomes of each request, and when: transitions with their times, and who waits (O4, I1).

The state machine is the job's own (`policy/job.py`). Every move goes through here, so that it has
a time, is counted, and reaches those who listen: metrics, event log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from vllm_semantic_sched.policy.job import Job, JobState
from vllm_semantic_sched.policy.order.heap import AddressableHeap


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
    """Is told what happens to jobs. Must not raise, block, or move jobs itself."""

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
        # By level as it was when the job was counted: whatever changes a job's level, the
        # tallies stay whole.
        self._counted: dict[Job, int] = {}
        self._waiting: dict[int, AddressableHeap[Job]] = {}
        self._running: Counter[int] = Counter()

    def arrive(self, job: Job) -> None:
        """A new job waits."""
        job.entered = job.arrival
        self._count(job)
        self._tell(job, None, job.arrival)

    def move(self, job: Job, state: JobState, reason: str = "", plan: str = "") -> None:
        """Change a job's state; see `Transition` for the arguments.

        Raises:
            IllegalTransition: the state machine has no such edge; nothing has changed.
        """
        before, now = job.state, self.clock()
        job.move_to(state, now)
        self._discount(job, before)
        if not state.is_end:
            self._count(job)
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

    def recount(self, job: Job) -> None:
        """A job's level changed."""
        if job in self._counted:
            self._discount(job, job.state)
            self._count(job)

    def waiting(self, level: int) -> int:
        """Jobs of a level that wait for a seat, wherever their KV is."""
        return len(self._waiting[level]) if level in self._waiting else 0

    def running(self, level: int) -> int:
        """Jobs of a level that have a seat."""
        return self._running[level]

    def longest_wait(self, level: int) -> float:
        """Seconds for which the job of a level that waits longest has been without a seat, since
        it arrived or lost its seat; 0 if none waits."""
        oldest = self._waiting[level].peek() if level in self._waiting else None
        return 0.0 if oldest is None else max(0.0, self.clock() - oldest.entered)

    def _count(self, job: Job) -> None:
        self._counted[job] = job.level
        if job.state is JobState.RUNNING:
            self._running[job.level] += 1
        else:
            heap = self._waiting.setdefault(job.level, AddressableHeap())
            heap.push(job, (job.entered, job.sequence))

    def _discount(self, job: Job, state: JobState) -> None:
        level = self._counted.pop(job, None)
        if level is None:
            return
        if state is JobState.RUNNING:
            self._running[level] -= 1
        else:
            self._waiting[level].discard(job)

    def _tell(
        self, job: Job, before: JobState | None, now: float, reason: str = "", plan: str = ""
    ) -> None:
        self.transitions[before, job.state] += 1
        if self.listeners:
            transition = Transition(job, before, job.state, now, reason, plan)
            for listener in self.listeners:
                listener.moved(transition)
