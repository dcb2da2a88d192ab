"""Levels that waiting requests gain: by a near deadline, and by aging, so that none starves.

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

from vllm_semantic_sched.policy.config.order import ROUNDING
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job

_MOST_PER_STEP = 20  # jobs, so that a burst of the same age does not delay a step
_DEADLINE_LEVELS = 0.5  # gained: below 1, so that a request only moves ahead within its own level


class Promotions(AddressableHeap[Job]):
    """Timers by which waiting jobs are promoted in steps (aging). One that leaves the queue is
    discarded, and keeps what it has gained."""

    def __init__(self, ref: PolicyRef) -> None:
        super().__init__()
        self._ref = ref
        self.count = 0  # promotions so far

    def wait(self, job: Job) -> None:
        """Start the timer of a job that waits; time in a seat counts only while it was held."""
        aging = self._ref.policy.aging
        done = job.promotions and job.promotions >= aging.most_promotions(job.level)
        if done or not aging.enabled:
            self.discard(job)
            return
        self.push(job, job.entered - job.waited + (job.promotions + 1) * aging.interval)

    def due(self, now: float) -> list[Job]:
        """Promote the jobs whose timers have expired, and return them."""
        promoted = list(self.pop_until(now, _MOST_PER_STEP))
        for job in promoted:
            # Rounding must not make the timer fire again for the same promotion.
            self.earn(job, job.waited + now - job.entered, least=job.promotions + 1)
            self.wait(job)
        return promoted

    def earn(self, job: Job, waited: float, least: int = 0) -> bool:
        """Give a job the promotions that `waited` seconds are worth; whether it got any."""
        aging = self._ref.policy.aging
        if not aging.enabled:
            return False
        most = aging.most_promotions(job.level)
        earned = min(max(least, int(waited / aging.interval)), most)
        if earned <= job.promotions:
            return False
        self.count += earned - job.promotions
        job.promotions = earned
        job.aged = aging.step * earned
        return True


class Overtaking:
    """Decides when an aged job may overtake a more urgent one."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self.count = 0  # overtakings so far
        self._credit = 1.0

    @property
    def allowed(self) -> bool:
        return self._ref.policy.aging.enabled and self._credit >= 1.0 - ROUNDING

    def admitted(self, overtook: bool) -> float:
        """Record an admission; returns the change of the credit, for `withdrawn`."""
        before = self._credit
        self.count += overtook
        self._credit = min(1.0, before - overtook + self._ref.policy.aging.share)
        return self._credit - before

    def withdrawn(self, overtook: bool, change: float) -> None:
        """Undo an admission."""
        self.count -= overtook
        self._credit = min(1.0, self._credit - change)


class DeadlineWatch(AddressableHeap[Job]):
    """Timers by which waiting jobs are raised shortly before their promised time to first token."""

    def __init__(self, ref: PolicyRef) -> None:
        super().__init__()
        self._ref = ref
        self.count = 0  # jobs raised so far
        # Raised waiting jobs that may preempt a job that has its first token.
        self.may_take_seats: set[Job] = set()
        self._takes_seats: dict[Job, bool] = {}

    def wait(self, job: Job, slo: Slo) -> None:
        """Start the timer of a job that begins to wait or has changed to a tier with this SLO."""
        rules = self._ref.policy.deadlines
        if not rules.enabled or slo.ttft is None or job.generated:
            job.deadline_boost = 0.0
            if job in self._takes_seats:
                self.stop(job)
            return
        job.deadline = job.arrival + slo.ttft
        raise_at = job.deadline - rules.before * slo.ttft
        self.push(job, job.deadline if job.deadline_boost else raise_at)
        self._takes_seats[job] = slo.takes_seats
        self._update_may_take_seats(job)

    def stop(self, job: Job) -> None:
        """Stop a job's timer; a raised job stays raised until its first token."""
        self.discard(job)
        self._takes_seats.pop(job, None)
        self.may_take_seats.discard(job)

    def due(self, now: float) -> list[Job]:
        """Raise jobs whose timers have expired, lower those past their deadline; returns both."""
        moved = []
        for job in self.pop_until(now, _MOST_PER_STEP):
            was_near, is_near = bool(job.deadline_boost), now < job.deadline
            job.deadline_boost = _DEADLINE_LEVELS if is_near else 0.0
            if is_near:
                self.count += 1
                self.push(job, job.deadline)
            self._update_may_take_seats(job)
            if was_near != is_near:
                moved.append(job)
        return moved

    def _update_may_take_seats(self, job: Job) -> None:
        if job.deadline_boost and self._takes_seats[job]:
            self.may_take_seats.add(job)
        else:
            self.may_take_seats.discard(job)
