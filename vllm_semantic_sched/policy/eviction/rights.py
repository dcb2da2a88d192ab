"""Whose seat and KV a waiting job may take, and who has to leave by himself."""

from __future__ import annotations

import math
from collections.abc import Callable

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.eviction.preemption import Need, choose_victims
from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.fairness import Fairness
from vllm_semantic_sched.policy.order.running import RunningSet


class EvictionRights:
    """Args:
        seconds_left: predicted seconds of work left of a waiting job, on the scale of
            `RunningSet.remaining`.

    Attributes:
        policy: the one in force; replaced as a whole.
    """

    def __init__(
        self,
        policy: Policy,
        running: RunningSet,
        fairness: Fairness,
        seconds_left: Callable[[Job], float],
    ) -> None:
        self.policy = policy
        self._running = running
        self._fairness = fairness
        self._seconds_left = seconds_left

    @property
    def wants_room(self) -> bool:
        """Whether some waiting job may take a running one's place. O(levels), so that a step in
        which nothing is to be done costs nothing."""
        waiting = self._fairness.waiting
        if self._some_insist or any(map(self._level_may_preempt, waiting.levels)):
            return True
        head = waiting.peek() if self.policy.preemption.shorter is not None else None
        return head is not None and self._is_much_shorter(head)

    def worth_preempting(self, job: Job) -> bool:
        """Whether some running job is so much less urgent that `job` may take its place. O(1).

        By its own level: what a job gained by waiting, by a near deadline or by its tier's share
        gets it the next seat that comes free, and never somebody's, unless its tier's promise
        insists (`tiers[].slo.takes_seats`). A tier over its share has no right to preempt such as
        its offset puts it behind.
        """
        insists = self._some_insist and job in self._fairness.deadlines.insisting
        return insists or self._level_may_preempt(job.level) or self._is_much_shorter(job)

    def need_of(self, job: Job, need: Need) -> Need:
        """What must come free for a job, given what the engine lacks: more where less urgent
        tiers fill their part beside a hard reservation."""
        missing = self._fairness.shortage(job)
        return Need(max(need.seats, missing.seats), max(need.blocks, missing.blocks))

    def victims_for(
        self,
        job: Job,
        need: Need,
        max_victims: int,
        freeable_blocks: Callable[[Job], int | None],
        preemption_seconds: Callable[[Job], float] | None = None,
    ) -> list[Job]:
        """See `policy.eviction.preemption.choose_victims`."""

        def freeable(victim: Job) -> int | None:
            return freeable_blocks(victim) if self.policy.tier(victim.level).preemptible else None

        borrowed = self._fairness.reservation.borrowed_from(job.level)
        insists = job in self._fairness.deadlines.insisting
        limits = self.policy.preemption
        longer_than = self._much_longer_than(job)

        def gives_way(victim: Job) -> bool:
            if victim.preemptions < limits.max_per_request and (
                (insists and victim.first_token is not None)
                or self._running.remaining(victim) >= longer_than
            ):
                return True
            return borrowed is not None and borrowed(victim)

        among_equals = insists or longer_than < math.inf

        return choose_victims(
            self._fairness.preempting_level(job.level),
            need,
            self._running,
            limits,
            max_victims,
            freeable,
            preemption_seconds,
            gives_way if among_equals or borrowed is not None else None,
            among_equals,
        )

    def intruder(self) -> tuple[Job, str] | None:
        """A running job that must give way, and why: `reservation`, because less urgent tiers
        hold part of a hard one, or `tenant_cap`, because its tenant holds too much KV, after one
        grew or turned out to be less urgent than thought."""
        above = self._fairness.reservation.over_limit()
        tenant = self._fairness.tenant_caps.over_limit()
        if above is None and tenant is None:
            return None
        for job in self._running.by_eviction():
            if above is not None and job.level > above:
                return job, "reservation"
            if job.tenant == tenant:
                return job, "tenant_cap"
        return None

    @property
    def _some_insist(self) -> bool:
        return bool(self._fairness.deadlines.insisting) and self.policy.preemption.enabled

    def _level_may_preempt(self, level: int) -> bool:
        worst = self._running.least_urgent()
        limits = self.policy.preemption
        if not limits.enabled or not self.policy.uses_urgency or worst is None:
            return False
        gap = worst.effective_level - self._fairness.preempting_level(level)
        return gap >= limits.min_level_gap or (gap > 0 and self._fairness.reservation.lent(level))

    def _is_much_shorter(self, job: Job) -> bool:
        worst = self._running.least_urgent()
        if worst is None or worst.effective_level < self._fairness.preempting_level(job.level):
            return False
        return self._running.remaining(worst) >= self._much_longer_than(job)

    def _much_longer_than(self, job: Job) -> float:
        """Remaining time from which a running job gives way to a shorter one; inf: none does."""
        limits = self.policy.preemption
        if limits.shorter is None or not limits.enabled or self.policy.base != "semantic":
            return math.inf
        return limits.shorter * self._seconds_left(job)
