"""Levels that waiting requests gain: by an SLO, and by aging, so that none starves.

- A request at level l that has waited k times `interval` seconds gets level l - k, and is promoted
  no further below level 0. There it is *overdue*; overdue requests run by arrival.
- The aged level orders the queue and protects a running request, but gives no right to preempt.
- A request that aging puts before a more urgent one overtakes it. Every admission earns `SHARE` of
  an overtaking, and at most one is saved: of N = 1 / SHARE admissions in a row one can go to the
  oldest overdue request, and the others go by urgency.

A request gets its first seat within

    W + (q + 1) N T       W = interval * (l + 1)

seconds. q older requests wait at its arrival; T is the longest time between two admissions while
requests wait, at most that for which a request holds a seat. Beside hard reservations of other
tiers, add (q + 1) S, with S the longest time that a request holds a seat.
"""

import math
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.order import ROUNDING
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job

# Most admissions, as a share, in which an aged request overtakes a more urgent one: what the bound
# on the wait costs urgent requests.
SHARE = 0.1
_MOST_PER_STEP = 40  # jobs, so that a burst of the same age does not delay a step
_DEADLINE_LEVELS = 0.5  # gained: below 1, so that a request only moves ahead within its own level


def promotions_to_overdue(level: int) -> int:
    """Promotions after which a request of that level is overdue, and the most that it gets."""
    return level + 1


@dataclass(slots=True)
class _Timer:
    """When the credit of a waiting job changes next, in seconds; inf: never."""

    promotion: float
    deadline: float = math.inf  # until which it is raised
    turn: float = math.inf  # at which it is raised, or misses its deadline
    takes_seats: bool = False  # whether it may preempt while it is raised

    @property
    def due(self) -> float:
        return min(self.promotion, self.turn)


class CreditTimers:
    """Timers by which waiting jobs gain levels: in steps by waiting (aging), and for a deadline,
    until that is missed. A job that leaves the queue has no timer and keeps what it has gained;
    what a deadline gave ends with the first token."""

    def __init__(self, ref: PolicyRef) -> None:
        self.promotions = 0  # so far
        self.deadline_boosted = 0  # jobs so far that a deadline raised
        # Raised waiting jobs that may preempt a job that has its first token.
        self.may_take_seats: set[Job] = set()
        self._ref = ref
        self._timers: dict[Job, _Timer] = {}
        self._due: AddressableHeap[Job] = AddressableHeap()

    def wait(self, job: Job, slo: Slo, stated: float | None = None) -> None:
        """Start the timers of a job that begins to wait, or whose policy, tier or estimates have
        changed. Time in a seat counts as waiting only while the job was held.

        Args:
            slo: of its tier.
            stated: until when a deadline of its own raises it, in place of the SLO; None: none.
        """
        timer = _Timer(self._next_promotion(job))
        deadline, takes_seats = stated, False
        if self._ref.policy.deadlines.enabled and slo.ttft is not None and not job.generated:
            of_tier = job.arrival + slo.ttft
            deadline = of_tier if stated is None else stated
            # What a client states gets it no right to preempt for longer than the SLO does.
            takes_seats = slo.takes_seats and deadline <= of_tier
        if deadline is not None:
            timer.deadline = deadline
            raised = job.credit is not None and job.credit.deadline
            timer.turn = timer.deadline if raised else job.arrival
            timer.takes_seats = takes_seats
        elif job.credit is not None:
            job.credit.deadline = 0.0
        self._store(job, timer)

    def stop(self, job: Job) -> None:
        """Stop a job's timers; no-op without any."""
        if self._timers.pop(job, None) is not None:
            self._due.discard(job)
            self.may_take_seats.discard(job)

    def clear(self) -> None:
        """Stop all timers."""
        self._timers.clear()
        self._due = AddressableHeap()
        self.may_take_seats.clear()

    def may_reach(self, now: float) -> bool:
        """Whether a timer may have expired; a False is certain."""
        return self._due.may_reach(now)

    def expire(self, now: float) -> list[Job]:
        """Change the credit of jobs whose timers have expired, and return those that moved."""
        moved = []
        for job in list(self._due.pop_until(now, _MOST_PER_STEP)):
            timer = self._timers[job]
            promoted, turned = timer.promotion <= now, timer.turn <= now
            if promoted:
                # Rounding must not make the timer fire again for the same promotion.
                earned = job.gain().promotions + 1
                self.earn(job, job.waited + now - job.entered, least=earned)
                timer.promotion = self._next_promotion(job)
            if turned:
                turned = self._turn(job, timer, now)
            self._store(job, timer)
            if promoted or turned:
                moved.append(job)
        return moved

    def earn(self, job: Job, waited: float, least: int = 0) -> bool:
        """Give a job the promotions that `waited` seconds are worth; whether it got any."""
        aging = self._ref.policy.aging
        if not aging.enabled:
            return False
        earned = min(max(least, int(waited / aging.interval)), promotions_to_overdue(job.level))
        before = 0 if job.credit is None else job.credit.promotions
        if earned <= before:
            return False
        self.promotions += earned - before
        credit = job.gain()
        credit.promotions, credit.waiting = earned, float(earned)
        return True

    def _turn(self, job: Job, timer: _Timer, now: float) -> bool:
        """Raise a job until its deadline, lower one past it; whether that changes its rank."""
        credit, is_near = job.gain(), now < timer.deadline
        changed = is_near != bool(credit.deadline)
        credit.deadline = _DEADLINE_LEVELS if is_near else 0.0
        timer.turn = timer.deadline if is_near else math.inf
        self.deadline_boosted += is_near
        return changed

    def _next_promotion(self, job: Job) -> float:
        """When a waiting job is promoted next; inf if it is not."""
        aging = self._ref.policy.aging
        promotions = 0 if job.credit is None else job.credit.promotions
        done = promotions and promotions >= promotions_to_overdue(job.level)
        if done or not aging.enabled:
            return math.inf
        return job.entered - job.waited + (promotions + 1) * aging.interval

    def _store(self, job: Job, timer: _Timer) -> None:
        if timer.due == math.inf:
            self.stop(job)
            return
        self._timers[job] = timer
        self._due.push(job, timer.due)
        if timer.takes_seats and job.credit is not None and job.credit.deadline:
            self.may_take_seats.add(job)
        else:
            self.may_take_seats.discard(job)


class Overtaking:
    """Decides when an aged job may overtake a more urgent one, if the policy has aging."""

    def __init__(self) -> None:
        self.count = 0  # overtakings so far
        self._saved = 1.0

    @property
    def allowed(self) -> bool:
        """Whether one has been saved up: each admission earns `SHARE` of it."""
        return self._saved >= 1.0 - ROUNDING

    def admitted(self, overtook: bool) -> float:
        """Record an admission; returns by how much what is saved changed, for `withdrawn`."""
        before = self._saved
        self.count += overtook
        self._saved = min(1.0, before - overtook + SHARE)
        return self._saved - before

    def withdrawn(self, overtook: bool, change: float) -> None:
        """Undo an admission."""
        self.count -= overtook
        self._saved = min(1.0, self._saved - change)
