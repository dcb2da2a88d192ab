"""Which waiting jobs may preempt running ones: by their own level, not by what they gained."""

from __future__ import annotations

import math
from collections.abc import Callable

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.decision import preempting_level
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.seating import Seating


class Entitlement:
    """Decides which waiting jobs may preempt.

    Args:
        seconds_left: predicted seconds of work left for a waiting job, on the scale of
            `RunningSet.remaining`.
    """

    def __init__(
        self,
        policy: Policy,
        running: RunningSet,
        seating: Seating,
        seconds_left: Callable[[Job], float],
    ) -> None:
        self._running = running
        self._seating = seating
        self._seconds_left = seconds_left
        self.adopt(policy)

    def adopt(self, policy: Policy) -> None:
        """Switch to a new policy."""
        self._policy = policy

    @property
    def wants_room(self) -> bool:
        """Whether any waiting job may preempt a running one. O(levels)."""
        waiting = self._seating.waiting
        if self._some_may_take_seats:
            return True
        worst = self._running.least_urgent()
        if worst is None:
            return False
        level = worst.effective_level
        if any(self._may_preempt(above, level) for above in waiting.levels):
            return True
        head = waiting.peek() if self._policy.preemption.shorter is not None else None
        return head is not None and self._is_much_shorter(head)

    def worth_preempting(self, job: Job) -> bool:
        """Whether `job` may preempt some running job. O(1).

        Its own level counts. What it gained by waiting, by a near deadline or by its tier's share
        gets it the next free seat but no preemption, unless `tiers[].slo.takes_seats` allows it.
        The offset of a tier over its share counts against it. A provisional level counts as far
        as it is probable (`predictor.instant`).
        """
        takes_seat = self._some_may_take_seats and job in self._seating.deadlines.may_take_seats
        if takes_seat:
            return True
        level = self._entitled_level(job)
        if level is None:
            return False
        return self._level_may_preempt(level) or self._is_much_shorter(job)

    def held_back(self, job: Job) -> bool:
        """Whether `job` may not preempt only because its level is provisional."""
        provisional = job.level_source is LevelSource.INSTANT
        return provisional and self._level_may_preempt(job.level) and not self.worth_preempting(job)

    def _entitled_level(self, job: Job) -> int | None:
        """The level at which `job` may preempt; None if it may not."""
        if job.level_source is not LevelSource.INSTANT or job.prediction is None:
            return job.level
        knobs = self._policy.predictor.instant
        return preempting_level(job.prediction.urgency, job.level, knobs)

    @property
    def _some_may_take_seats(self) -> bool:
        return bool(self._seating.deadlines.may_take_seats) and self._policy.preemption.enabled

    def _level_may_preempt(self, level: int) -> bool:
        worst = self._running.least_urgent()
        return worst is not None and self._may_preempt(level, worst.effective_level)

    def _may_preempt(self, level: int, worst: float) -> bool:
        """Whether jobs of `level` may preempt one of the effective level `worst`."""
        policy = self._policy
        limits = policy.preemption
        if not limits.enabled or not policy.uses_urgency:
            return False
        gap = worst - self._seating.preempting_level(level)
        if gap <= 0:
            return False
        if self._seating.reservation.lent(level):
            return True
        # Weighted levels are one level: a seat that a short request got is not taken back at once.
        return gap >= limits.min_level_gap and not policy.weighted_levels.weighs(level)

    def _is_much_shorter(self, job: Job) -> bool:
        worst = self._running.least_urgent()
        if worst is None or worst.effective_level < self._seating.preempting_level(job.level):
            return False
        return self._running.remaining(worst) >= self._much_longer_than(job)

    def _much_longer_than(self, job: Job) -> float:
        """Remaining seconds from which a running job gives way to `job`; inf: never."""
        limits = self._policy.preemption
        if limits.shorter is None or not limits.enabled or self._policy.base != "semantic":
            return math.inf
        if self._policy.weighted_levels.weighs(job.level):
            return math.inf
        return limits.shorter * self._seconds_left(job)
