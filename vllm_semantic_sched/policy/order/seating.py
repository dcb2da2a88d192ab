"""From queue to seat: aging, deadlines, shares, tenants and reservations decide who is next."""

from collections.abc import Callable

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.estimates.decision import LevelWorth, level_worth
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import AHEAD, EngineCapacity, Need
from vllm_semantic_sched.policy.facts.job import Charge, Job
from vllm_semantic_sched.policy.order.credit import CreditTimers
from vllm_semantic_sched.policy.order.inversions import Inversions
from vllm_semantic_sched.policy.order.meter import UsageMeter
from vllm_semantic_sched.policy.order.queues import OrderingRules
from vllm_semantic_sched.policy.order.tenants import TopLevelGuard
from vllm_semantic_sched.policy.order.waiting import WaitingQueue


class Seating(OrderingRules):
    """Follows jobs through the queue and their seats, and rules the order of the queue. A job that
    is taken out of the queue either starts within the same step or, not ready, returns."""

    def __init__(self, ref: PolicyRef, estimates: Estimator) -> None:
        super().__init__(ref, estimates)
        self.credits = CreditTimers(ref)
        self.top_levels = TopLevelGuard(ref)
        self.inversions: Inversions | None = None  # see `SchedulingCore.watch_order`
        self.meter = UsageMeter(lambda: estimates.profile, self._charge, self.allocations)
        self.waiting = WaitingQueue(self)
        self._worth = Derived(ref, level_worth)
        # Whether a job that enters the queue matters to more than the queue: see `wait_first`.
        self.watches_waiting = Derived(ref, _watches_waiting)

    def set_capacity(self, capacity: EngineCapacity, tokens_per_step: int) -> None:
        """See `SchedulingCore.set_capacity`."""
        self.allocations.capacity = capacity
        self.limits.capacity_known()
        self.kv_peak.set_capacity(capacity)
        self.meter.tokens_per_step = tokens_per_step

    def policy_changed(self) -> None:
        """Forget what the previous policy decided."""
        self.fair_share.reset()
        if not self.used.table.kv_peak:
            self.kv_peak.clear()
        if not self.used.table.timers:
            self.credits.clear()
        self.waiting.changed()

    @property
    def worth(self) -> LevelWorth:
        """Worth of a second of a request, by level."""
        return self._worth.table

    @property
    def reorders_levels(self) -> bool:
        """Whether a less urgent job can get ahead of a more urgent one."""
        policy = self.ref.policy
        return policy.aging.enabled or policy.deadlines.raises or policy.fair_share.enabled

    # From queue to seat

    def wait_first(self, job: Job) -> None:
        """Record that a job enters the queue for the first time."""
        self.start_timers(job)
        if self.ref.policy.kv_peak.enabled:
            self.waiting.changed()  # whether the next job fits depends on the time, too

    def wait(self, job: Job) -> None:
        """Record that a job enters the queue or returns to it."""
        charge = job.seat.charge if job.seat is not None else None
        if charge is not None:
            self.overtaking.withdrawn(charge.overtook, charge.credit)
            self._charge(job, -charge.seconds, charge.level, to_tenant=not job.preempted.times)
        self.allocations.release(job)
        if self.used.table.kv_peak:
            self.kv_peak.discard(job)
        self.start_timers(job)

    def take(self, job: Job) -> None:
        """Take a job out of the queue to give it a seat."""
        if self.inversions is not None:
            self.inversions.taken(job, self.waiting)
        overtook = self.waiting.overtakes(job)
        self.waiting.remove(job)
        self._admit(job, overtook)

    def start(self, job: Job) -> None:
        """Record that a job got its seat, by `take` or by the engine's own choice."""
        if job.seat is None or job.seat.charge is None:
            self._admit(job, overtook=False)
        assert job.seat is not None and job.seat.charge is not None
        job.seat.charge = None
        if self.used.table.timers:
            self.credits.stop(job)
        # Without it a tier over its share would take back the seat that it just lost.
        missing = max(0.0, -self.fair_share.offsets[job.level])
        if missing or job.credit is not None:
            job.gain().share = missing
        if self.metered:
            self.meter.start(job)
        self.waiting.changed()

    def leave(self, job: Job) -> None:
        """Record that a job lost its seat or ended; its `generated` is up to date."""
        if self.used.table.timers:
            self.credits.stop(job)
        if job.seat is not None and job.seat.stint is not None:
            self.meter.stop(job)
        self.allocations.release(job)
        if self.used.table.kv_peak:
            self.kv_peak.discard(job)
        if job.credit is not None:
            job.credit.share = 0.0
        self.waiting.changed()

    def relevel(self, job: Job, before: int) -> None:
        """Record that a job's level was `before` and has changed."""
        self.allocations.relevel(job, before)
        if job in self.waiting:
            self.start_timers(job)

    def step(self, now: float, observe: Callable[[Job], None]) -> list[Job]:
        """Begin an engine step; returns waiting jobs whose rank changed."""
        metered = self.metered
        if metered:
            self.meter.step(observe)
        moved = self.credits.expire(now) if self.used.table.timers else []
        if self.used.table.shares:
            self.fair_share.update(now, self.waiting.levels)
        if metered:
            self.waiting.changed()
        return moved

    def may_move(self, now: float) -> bool:
        """Whether `step` may do anything."""
        return self.metered or (self.used.table.timers and self.credits.may_reach(now))

    # Derived state

    def start_by(self, job: Job) -> float | None:
        """The latest time at which a waiting job that a deadline raises must start, which orders
        such jobs at any time as their slack does: that time less the present one. None where the
        order is another."""
        credit, policy = job.credit, self.ref.policy
        if credit is None or not credit.deadline:
            return None
        if policy.weighs(job.level):  # there times of work are compared, across levels
            return None
        starts = self._latest_starts(job)
        slo = policy.all_tiers[job.level].slo
        if not starts and slo.ttft is not None:
            starts = [job.arrival + slo.ttft - self.admission_seconds(job)]
        return min(starts, default=None)

    def _latest_starts(self, job: Job) -> list[float]:
        """When a job must start to keep each deadline that it states, by predicted times; that of
        the whole answer first."""
        answer, first_token = job.deadlines
        starts = []
        if answer is not None:
            starts.append(job.arrival + answer - self.answer_seconds(job))
        if first_token is not None and not job.generated:
            starts.append(job.arrival + first_token - self.admission_seconds(job))
        return starts

    def preempting_level(self, level: int) -> float:
        """The level at which a job of `level` preempts: a tier over its share is less urgent."""
        return level + max(0.0, self.fair_share.offsets[level])

    def shortage(self, job: Job) -> Need:
        """What less urgent tiers must free before hard reservations admit a job."""
        return self.limits.shortage(job.level, job.tokens + AHEAD)

    @property
    def timeless(self) -> bool:
        """Whether only jobs that come, go, are predicted or outlive estimates change the order."""
        policy = self.ref.policy
        return not (self.metered or policy.aging.enabled or policy.deadlines.raises)

    @property
    def metered(self) -> bool:
        """Whether order and right to preempt depend on what running jobs use as well."""
        policy = self.ref.policy
        return policy.tenants.fair or policy.fair_share.enabled or self.limits.table.reserves

    def start_timers(self, job: Job) -> None:
        """Start the timers of a waiting job, if it needs any: see `CreditTimers.wait`."""
        if not self.used.table.timers and job.credit is None:
            return
        policy, stated = self.ref.policy, None
        if policy.deadlines.stated and (starts := self._latest_starts(job)):
            stated = starts[0]
        self.credits.wait(job, policy.all_tiers[job.level].slo, stated)

    def _admit(self, job: Job, overtook: bool) -> None:
        seconds = self.admission_seconds(job)
        credit = self.overtaking.admitted(overtook) if self.used.table.aging else 0.0
        seat = self.allocations.occupy(job, job.tokens + AHEAD)
        seat.generated = job.generated
        seat.charge = Charge(job.level, seconds, overtook, credit)
        if self.used.table.kv_peak:
            self.kv_peak.add(job)
        self._charge(job, seconds, to_tenant=not job.preempted.times)
        self.waiting.changed()

    def _charge(
        self, job: Job, seconds: float, level: int | None = None, to_tenant: bool = True
    ) -> None:
        """Charge a tier, and the tenant too unless it recomputes after a preemption."""
        level = job.level if level is None else level
        if self.used.table.shares:
            self.fair_share.charge(level, seconds)
        if to_tenant and self.by_tenant:
            queue = self.waiting.queues[level]
            queue.counters.charge(queue.tenant_of(job), seconds)


def _watches_waiting(policy: Policy) -> bool:
    return policy.aging.enabled or policy.deadlines.raises or policy.kv_peak.enabled
