"""Aging: waiting requests are promoted by steps, so that none starves.

- A request at level l that has waited k times `interval` seconds gets level l - k `step`, with at
  most `cap` promotions. Below level 0 it is *overdue*; overdue requests run by arrival.
- The aged level orders the queue and protects a running request, but gives no right to preempt.
- A request that aging puts before a more urgent one overtakes it. Every admission earns `share` of
  an overtaking, and at most one is saved: of N = ceil(1 / share) admissions in a row one can go to
  the oldest overdue request, and the others go by urgency.

A request that can become overdue (no `cap`, or cap * step >= l + 1) gets its first seat within

    W + (q + 1) N T       W = interval * ceil((l + 1) / step)

seconds. q older requests wait at its arrival; T is the longest time between two admissions while
requests wait, at most that for which a request holds a seat. Beside hard reservations of other
tiers, add (q + 1) S, with S the longest time that a request holds a seat.
"""

from __future__ import annotations

from vllm_semantic_sched.policy.config.order import ROUNDING, Aging
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job

_MOST_PER_STEP = 20  # promotions, so that a burst of the same age does not delay a step


class Promotions:
    """Promotes waiting jobs by a timer heap, O(log n) each."""

    def __init__(self, knobs: Aging) -> None:
        self.knobs = knobs
        self.count = 0  # promotions so far
        self._timers: AddressableHeap[Job] = AddressableHeap()

    def wait(self, job: Job) -> None:
        """Start the timer of a job that waits, or waits again; time in a seat counts only while
        it was held."""
        done = job.promotions and job.promotions >= self.knobs.most_promotions(job.level)
        if done or not self.knobs.enabled:
            self._timers.discard(job)
            return
        due = job.entered - job.waited + (job.promotions + 1) * self.knobs.interval
        self._timers.push(job, due)

    def stop(self, job: Job) -> None:
        """Stop a job's timer; it keeps its promotions."""
        self._timers.discard(job)

    def may_be_due(self, now: float) -> bool:
        return self._timers.may_reach(now)

    def due(self, now: float) -> list[Job]:
        """Promote the jobs whose timers have expired, and return them."""
        promoted = list(self._timers.pop_until(now, _MOST_PER_STEP))
        for job in promoted:
            # Rounding must not make the timer fire again for the same promotion.
            self.earn(job, job.waited + now - job.entered, least=job.promotions + 1)
            self.wait(job)
        return promoted

    def earn(self, job: Job, waited: float, least: int = 0) -> bool:
        """Give a job the promotions that `waited` seconds are worth, at least `least`; whether it
        got any."""
        if not self.knobs.enabled:
            return False
        most = self.knobs.most_promotions(job.level)
        earned = min(max(least, int(waited / self.knobs.interval)), most)
        if earned <= job.promotions:
            return False
        self.count += earned - job.promotions
        job.promotions = earned
        job.aged = self.knobs.step * earned
        return True


class Overtaking:
    """Decides when an aged job may overtake a more urgent one."""

    def __init__(self, knobs: Aging) -> None:
        self.knobs = knobs
        self.count = 0  # overtakings so far
        self._credit = 1.0

    @property
    def allowed(self) -> bool:
        return self.knobs.enabled and self._credit >= 1.0 - ROUNDING

    def admitted(self, overtook: bool) -> float:
        """Record an admission; returns the change of the credit, for `withdrawn`."""
        before = self._credit
        self.count += overtook
        self._credit = min(1.0, before - overtook + self.knobs.share)
        return self._credit - before

    def withdrawn(self, overtook: bool, change: float) -> None:
        """Undo an admission."""
        self.count -= overtook
        self._credit = min(1.0, self._credit - change)
