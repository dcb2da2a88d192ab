"""Aging: a request that waits is promoted by steps, so that nobody starves (S5).

The rule, and the bound that follows from it:

- A request at level l that has waited `interval` seconds k times stands at l - k `step`, at most
  `cap` promotions; below level 0 it is *overdue*, and all overdue requests go by arrival.
- Its level orders the queue and protects it once it runs. It gives no right to preempt: an aged
  request gets the next free seat, never somebody's.
- A request that aging puts before a more urgent one overtakes it. Every admission earns `share`
  of an overtaking, and at most one is saved up, so that of N = ceil(1 / share) admissions in a
  row, one can go to the oldest overdue request and the others go by urgency.

A request that may become overdue (no `cap`, or cap * step >= l + 1) gets its first seat within

    W + (q + 1) N T       W = interval * ceil((l + 1) / step)

seconds, where q is the number of older requests that wait when it arrives and T the longest time
between two admissions while requests wait; T is at most the time that one request holds a seat.
Where other tiers have hard reservations, a seat open to its tier must come free as well: add
(q + 1) S, where S is the longest time that a request holds a seat.
"""

from __future__ import annotations

from vllm_semantic_sched.policy.config.order import ROUNDING, Aging
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job

# Promotions in one step at most, so that a flood that grows old together does not hold one up;
# the others follow in the next steps.
_MOST_PER_STEP = 20


class Promotions:
    """Promotes waiting jobs when their time has come. A timer heap names them: O(log n) each,
    nothing is scanned.

    Attributes:
        knobs: as given; may be changed.
        count: promotions so far.
    """

    def __init__(self, knobs: Aging) -> None:
        self.knobs = knobs
        self.count = 0
        self._timers: AddressableHeap[Job] = AddressableHeap()

    def wait(self, job: Job) -> None:
        """A job waits, or waits again; time in a seat in between does not count."""
        if not self.knobs.enabled or job.promotions >= self.knobs.most_promotions(job.level):
            self._timers.discard(job)
            return
        due = job.entered - job.waited + (job.promotions + 1) * self.knobs.interval
        self._timers.push(job, due)

    def stop(self, job: Job) -> None:
        """A job no longer waits. It keeps its promotions."""
        self._timers.discard(job)

    def due(self, now: float) -> list[Job]:
        """Promote the jobs whose time has come, and return them."""
        promoted: list[Job] = []
        for job in self._timers.pop_until(now, _MOST_PER_STEP):
            promoted.append(job)
            waited = job.waited + now - job.entered
            # The timer has fired: rounding must not make it fire again for the same promotion.
            earned = max(job.promotions + 1, int(waited / self.knobs.interval))
            earned = min(earned, self.knobs.most_promotions(job.level))
            self.count += earned - job.promotions
            job.promotions = earned
            job.aged = self.knobs.step * earned
            self.wait(job)
        return promoted


class Overtaking:
    """Says when an aged job may go before a more urgent one.

    Attributes:
        knobs: as given; may be changed.
        count: overtakings so far.
    """

    def __init__(self, knobs: Aging) -> None:
        self.knobs = knobs
        self.count = 0
        self._credit = 1.0

    @property
    def allowed(self) -> bool:
        return self.knobs.enabled and self._credit >= 1.0 - ROUNDING

    def admitted(self, overtook: bool) -> float:
        """A job was admitted; what that changed the credit by, for `withdrawn`."""
        before = self._credit
        self.count += overtook
        self._credit = min(1.0, before - overtook + self.knobs.share)
        return self._credit - before

    def withdrawn(self, overtook: bool, change: float) -> None:
        """An admission did not happen after all."""
        self.count -= overtook
        self._credit = min(1.0, self._credit - change)
