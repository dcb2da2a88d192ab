"""Checks two orders by urgency, for the event log and the simulator: nothing here decides.

- Seat-order inversion: a request got its first seat after a less urgent one that arrived later. Of
  all these, the one that arrived last tells the cause. Requests without a seat are not counted.
- Finish-order inversion (arXiv 2506.12204, eq. 2): a request was there when a less urgent one
  finished. Wherever requests of several levels share a batch, some are.
"""

import enum
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.order.waiting import WaitingQueue
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition


class InversionCause(enum.Enum):
    """Why a less urgent request that arrived later got its first seat before a request."""

    UNREAD = "unread"  # the prediction of one of them was not back
    MISREAD = "misread"  # it was taken for no more urgent; only the simulator can tell
    SHORTER = "shorter"  # the policy puts short requests first
    PROMOTED = "promoted"  # the other one gained levels: aging, deadlines, fair shares
    LIMIT = "limit"  # its tenant's cap or a hard reservation kept it waiting
    NOT_READY = "not_ready"  # the engine skipped it: its grammar, adapter or KV was not ready


_NONE: Mapping[int, InversionCause] = MappingProxyType({})


class _FirstSeat(NamedTuple):
    """A first seat, and the job as it was known then."""

    place: int  # among all first seats
    sequence: int
    level: int
    unread: bool
    causes: Mapping[int, InversionCause]  # why it went before those waiting at more urgent levels


class FinishOrder:
    """Finds finish-order inversions. O(levels) for each request, and O(levels) memory."""

    def __init__(self, levels: int) -> None:
        # For each level, the two latest times at which a less urgent request finished.
        self._finishes = [(-math.inf, -math.inf)] * levels

    def finish(self, level: int, arrival: float, now: float) -> bool:
        """Record a finish; whether it is an inversion. Times must not decrease; requests that
        finish at the same time do not invert each other's order."""
        latest, before = self._finishes[level]
        inverted = (latest if latest < now else before) >= arrival
        for above in range(level):
            latest, before = self._finishes[above]
            if latest < now:
                self._finishes[above] = now, latest
        return inverted


class Inversions(Listener):
    """Finds inversions of both orders. O(levels) for each request.

    Args:
        seat_inverted: told of a job at its first seat, and of the cause.
        finish_inverted: told of a job when it completes.
        level_of: the urgency that both orders are about.
    """

    def __init__(
        self,
        levels: int,
        seat_inverted: Callable[[Job, InversionCause], None],
        finish_inverted: Callable[[Job], None],
        level_of: Callable[[Job], int] = lambda job: job.level,
    ) -> None:
        self._seat_inverted = seat_inverted
        self._finish_inverted = finish_inverted
        self._level_of = level_of
        self._finishes = FinishOrder(levels)
        self._seats = 0
        # For each level, among the less urgent jobs with a first seat, the one that arrived last.
        self._latest: list[_FirstSeat | None] = [None] * levels
        self._causes: dict[Job, Mapping[int, InversionCause]] = {}  # taken for a first seat
        # Read while they waited for a first seat: the first seats given before, their level then.
        self._read: dict[Job, tuple[int, int]] = {}

    def taken(self, job: Job, waiting: WaitingQueue) -> None:
        """Record that a job is about to be taken out of the queue for its seat."""
        if job.started is None and job.level:
            self._causes[job] = {
                level: _why_first(level, job, waiting)
                for level, queue in waiting.queues.items()
                if level < job.level and queue
            }

    def read(self, job: Job) -> None:
        """Record that a job without a first seat is about to get another level: its prediction
        comes, or an operator sets it."""
        self._read[job] = self._seats, job.level

    def moved(self, transition: Transition) -> None:
        """Look for an inversion at a first seat and at a completion."""
        job, before, state, time = transition[:4]
        if state is JobState.RUNNING:
            if job.started == time and before is JobState.WAITING:
                self._seated(job)
        elif state.is_end:
            self._causes.pop(job, None)
            self._read.pop(job, None)
            if state is JobState.COMPLETED and self._finishes.finish(
                self._level_of(job), job.arrival, time
            ):
                self._finish_inverted(job)

    def _seated(self, job: Job) -> None:
        level, causes = self._level_of(job), self._causes.pop(job, _NONE)
        read_after, unread_level = self._read.pop(job, (0, 0))
        latest = self._latest[level]
        if latest is not None and latest.sequence > job.sequence:
            read_later = read_after > latest.place
            known = unread_level if read_later else job.level
            self._seat_inverted(job, _cause(job, latest, known, read_later))
        if level:
            seat = _FirstSeat(self._seats, job.sequence, job.level, job.level_unread, causes)
            for above in range(level):
                latest = self._latest[above]
                if latest is None or latest.sequence < job.sequence:
                    self._latest[above] = seat
        self._seats += 1


def _why_first(level: int, job: Job, waiting: WaitingQueue) -> InversionCause:
    """Why `job`, the result of `peek`, goes before the jobs of a more urgent level."""
    if waiting.overtakes(job):
        return InversionCause.PROMOTED
    head = waiting.queues[level].peek()
    if head is None or not waiting.rules.admits(head[1]):
        return InversionCause.LIMIT
    promoted = waiting.rules.by_level and waiting.level_of(job) <= waiting.level_of(head[1])
    return InversionCause.PROMOTED if promoted else InversionCause.SHORTER


def _cause(job: Job, other: _FirstSeat, level: int, read_later: bool) -> InversionCause:
    """Why `other` got its first seat before `job`, whose level was `level` then."""
    if level < other.level and (cause := other.causes.get(level)) is not None:
        return cause
    if read_later or job.level_unread or other.unread:
        return InversionCause.UNREAD
    return InversionCause.NOT_READY if level < other.level else InversionCause.MISREAD
