"""Checks two orders by urgency.

- First seats: a request that gets its first seat after a less urgent one that arrived later was
  *passed*; of all that passed it, the one that arrived last tells the cause. Requests without a
  seat are not counted.
- Finishes (arXiv 2506.12204, eq. 2): a request that was there when a less urgent one finished was
  *outrun*. Wherever requests of several levels share a batch, some are.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job, PassCause


class _FirstSeat(NamedTuple):
    """A first seat, and the job as it was known then."""

    place: int  # among all first seats
    sequence: int
    level: int
    unread: bool
    passes: Mapping[int, PassCause]  # why it went before the waiting ones of more urgent levels


class Precedence:
    """Finds the requests that were passed or outrun. O(levels) for each, and O(levels) memory."""

    def __init__(self, levels: int) -> None:
        # The urgency that both orders are about; the simulator sets the true one.
        self.level_of: Callable[[Job], int] = lambda job: job.level
        # For each level, the two latest times at which a less urgent request finished.
        self._finishes = [(-math.inf, -math.inf)] * levels
        self._seats = 0
        # For each level, among the less urgent jobs with a first seat, the one that arrived last.
        self._latest: list[_FirstSeat | None] = [None] * levels

    def read(self, job: Job) -> None:
        """A waiting job's prediction is about to change its level."""
        job.read_after, job.unread_level = self._seats, job.level

    def seat(self, job: Job, passes: Mapping[int, PassCause]) -> None:
        """Record a job's first seat and whether it was passed; see `WaitingQueue.passes`."""
        level = self.level_of(job)
        latest = self._latest[level]
        if latest is not None and latest.sequence > job.sequence:
            job.passed = _cause(job, latest)
        if level:
            seat = _FirstSeat(self._seats, job.sequence, job.level, job.level_unread, passes)
            for above in range(level):
                latest = self._latest[above]
                if latest is None or latest.sequence < job.sequence:
                    self._latest[above] = seat
        self._seats += 1

    def finish(self, level: int, arrival: float, now: float) -> bool:
        """Record a finish; whether the request was outrun. Times must not decrease; requests that
        finish at the same time do not outrun each other."""
        latest, before = self._finishes[level]
        outrun = (latest if latest < now else before) >= arrival
        for above in range(level):
            latest, before = self._finishes[above]
            if latest < now:
                self._finishes[above] = now, latest
        return outrun


def _cause(job: Job, other: _FirstSeat) -> PassCause:
    """Why `other` got its first seat before `job`."""
    read_later = job.read_after > other.place
    level = job.unread_level if read_later else job.level
    if level < other.level and (cause := other.passes.get(level)) is not None:
        return cause
    if read_later or job.level_unread or other.unread:
        return PassCause.UNREAD
    return PassCause.NOT_READY if level < other.level else PassCause.MISREAD
