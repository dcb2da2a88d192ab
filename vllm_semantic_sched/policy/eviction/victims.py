"""Chooses running jobs to preempt for waiting ones (paper, Alg. 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.eviction import Preemption
from vllm_semantic_sched.policy.estimates.decision import level_worth, preempting_level
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.seating import Seating
from vllm_semantic_sched.policy.profile.formula import EngineProfile

# Weight of the latest gap between two seats that came free.
_RATE = 0.1

# Jobs of a level among which the cheapest victim is searched.
_COMPARED = 64


# Waiting jobs that a step examines to make room for them.
_LOOKAHEAD = 64

# Of these, jobs without the right to preempt that a step passes over.
_PASSED = 8


@dataclass(slots=True)
class Room:
    """Room for waiting jobs in the coming step: seats, KV blocks, prefill tokens."""

    seats: int
    blocks: int
    prefill_tokens: float


class AdmissionView(Protocol):
    """The engine's view of single jobs."""

    def is_ready(self, job: Job) -> bool:
        """Whether a waiting job could be admitted if there were room."""

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job needs."""

    def freeable_blocks(self, job: Job) -> int | None:
        """KV blocks that a running job would free; None if it cannot be preempted now."""

    def preemption_seconds(self, job: Job) -> float:
        """Engine seconds that preempting a running job would cost."""


def choose_victims(
    level: float,
    need: Need,
    running: RunningSet,
    limits: Preemption,
    max_victims: int,
    freeable_blocks: Callable[[Job], int | None],
    preemption_seconds: Callable[[Job], float] | None = None,
    gives_way: Callable[[Job], bool] | None = None,
    among_equals: bool = False,
) -> list[Job]:
    """Choose victims that make room for a new job of `level`.

    Victims come off the eviction heap, least urgent first. Each is at least `min_level_gap` levels
    less urgent than the new job and was not preempted too often; `gives_way` lifts both
    protections from less urgent jobs. The result is empty if the eligible jobs do not suffice, and
    omits victims that later ones made unnecessary.

    The effective level of a running job counts, so what it gained by waiting protects it.

    Args:
        max_victims: most victims to return.
        freeable_blocks: KV blocks that a job would free; None if it cannot be preempted now.
        preemption_seconds: cost of preempting a job; needed for `victim: cost`.
        gives_way: whether a job has no protection; None: all jobs have it.
        among_equals: whether jobs that give way may be as urgent as the new job.
    """
    candidates = running.by_eviction()
    if limits.victim == "cost" and preemption_seconds is not None:
        candidates = _cheapest_first(candidates, preemption_seconds)
    chosen: list[tuple[Job, int]] = []
    blocks = 0
    for job in candidates:
        if (len(chosen) >= need.seats and blocks >= need.blocks) or len(chosen) == max_victims:
            break
        its_level = job.effective_level
        near = its_level < level + limits.min_level_gap
        above = its_level < level or (its_level == level and not among_equals)
        if above or (near and gives_way is None):
            break  # all others are at least as urgent
        protected = near or job.preemptions >= limits.max_per_request
        if protected and (gives_way is None or not gives_way(job)):
            continue
        freed = freeable_blocks(job)
        if freed is not None:
            chosen.append((job, freed))
            blocks += freed
    if len(chosen) < need.seats or blocks < need.blocks:
        return []
    return _without_spare(chosen, blocks, need)


def _cheapest_first(jobs: Iterable[Job], cost: Callable[[Job], float]) -> Iterator[Job]:
    """The first jobs of each level by cost, the others in the given order; lazily."""
    for _, same_level in itertools.groupby(jobs, key=lambda job: job.effective_level):
        yield from sorted(itertools.islice(same_level, _COMPARED), key=cost)
        yield from same_level  # noqa: B031 - the jobs that were not compared


def _without_spare(chosen: list[tuple[Job, int]], blocks: int, need: Need) -> list[Job]:
    kept = list(chosen)
    # Spare the most urgent first.
    for victim in reversed(chosen):
        if len(kept) > need.seats and blocks - victim[1] >= need.blocks:
            kept.remove(victim)
            blocks -= victim[1]
    return [job for job, _ in kept]


class VictimEligibility:
    """Decides which running jobs may be preempted for which waiting ones.

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
        self._policy = policy
        self._running = running
        self._seating = seating
        self._seconds_left = seconds_left
        self._worth = level_worth(policy)
        self._freed_at: float | None = None
        self._gap = math.inf  # mean seconds until a seat comes free by itself
        self._unpaid: Job | None = None  # found no victim worth a seat, and none came free since

    def adopt(self, policy: Policy, profile: EngineProfile) -> None:
        """Switch to a new policy."""
        self._policy = policy
        self._worth = level_worth(policy)
        self._unpaid = None

    def seat_freed(self, now: float) -> None:
        """Record that a running job ended."""
        if self._freed_at is not None:
            gap = now - self._freed_at
            self._gap = gap if self._gap == math.inf else self._gap + _RATE * (gap - self._gap)
        self._freed_at = now
        self._unpaid = None

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

    def plan(self, room: Room, view: AdmissionView) -> list[Job]:
        """Running jobs to preempt before a step for waiting ones, which vLLM itself never does.

        Goes down the waiting queue as far as jobs can be admitted in this step, and subtracts what
        each takes from `room`. A job that age, deadline or its tier's share put before a more
        urgent one takes free room first, so it counts although no job is preempted for it.
        """
        seating = self._seating
        victims: list[Job] = []
        passed = 0
        for job in itertools.islice(seating.waiting.ordered(), _LOOKAHEAD):
            entitled = self.worth_preempting(job)
            if room.prefill_tokens <= 0:
                break
            if not entitled:
                passed += 1
                out_of_order = seating.reorders_levels or self.held_back(job)
                if passed > (_PASSED if out_of_order else 0):
                    break
            if not seating.kv_peak.admits(job):
                break
            if not view.is_ready(job) or not seating.tenant_caps.admits(job):
                continue
            blocks = view.needed_blocks(job)
            need = self._need_of(job, room.seats, room.blocks, blocks)
            if entitled and not need.met:
                chosen = self.victims_for(job, need, view, victims)
                if not chosen:
                    break
                victims += chosen
                room.seats += len(chosen)
                room.blocks += sum(view.freeable_blocks(victim) or 0 for victim in chosen)
            room.seats -= 1
            room.blocks -= blocks
            room.prefill_tokens -= job.tokens
        return victims

    def victims_for(
        self, job: Job, need: Need, view: AdmissionView, beside: Sequence[Job] = ()
    ) -> list[Job]:
        """Victims for a waiting job, see `choose_victims`; empty if it gets none.

        A victim must be worth its seat: the engine time that its preemption costs all running jobs
        is worth less than the time that `job` would wait for room to come free. What a deadline or
        a reservation entitles to is not weighed.

        Args:
            beside: victims that were chosen in this step for others.
        """
        if job is self._unpaid:
            return []
        takes_seat = job in self._seating.deadlines.may_take_seats
        borrowed = self._seating.reservation.borrowed_from(job.level)
        unweighed = takes_seat or borrowed is not None
        affordable = math.inf if unweighed else self._affordable_seconds(job, need)

        def freeable(victim: Job) -> int | None:
            if not self._policy.tier(victim.level).preemptible:
                return None
            if view.preemption_seconds(victim) > affordable:
                self._unpaid = job
                return None
            return None if victim in beside else view.freeable_blocks(victim)

        level = self._entitled_level(job)
        if level is None:
            level = job.level  # it takes a seat by its deadline
        longer_than = self._much_longer_than(job)
        among_equals = takes_seat or longer_than < math.inf
        limits = self._policy.preemption
        victims = choose_victims(
            self._seating.preempting_level(level),
            need,
            self._running,
            limits,
            limits.max_victims_per_step - len(beside),
            freeable,
            view.preemption_seconds,
            self._gives_way(takes_seat, longer_than, borrowed),
            among_equals,
        )
        if victims:
            self._unpaid = None
        return victims

    def _gives_way(
        self, takes_seat: bool, longer_than: float, borrowed: Callable[[Job], bool] | None
    ) -> Callable[[Job], bool] | None:
        """Which running jobs have no protection against a waiting one; None: all have it."""
        if not takes_seat and longer_than == math.inf:
            return borrowed
        limit = self._policy.preemption.max_per_request

        def gives_way(victim: Job) -> bool:
            if victim.preemptions < limit and (
                (takes_seat and victim.first_token is not None)
                or self._running.remaining(victim) >= longer_than
            ):
                return True
            return borrowed is not None and borrowed(victim)

        return gives_way

    def _need_of(self, job: Job, seats: int, free_blocks: int, blocks: int) -> Need:
        """Seats and blocks to free for a job that needs `blocks`: what the engine lacks, or more
        if less urgent tiers use up their part beside a hard reservation."""
        missing = self._seating.shortage(job)
        return Need(max(1 - seats, missing.seats), max(blocks - free_blocks, missing.blocks))

    def over_quota_job(self) -> tuple[Job, str] | None:
        """A running job that must be preempted because a job grew or became less urgent, and the
        reason: `reservation` if less urgent tiers hold part of a hard reservation, `tenant_cap` if
        its tenant holds too much KV."""
        above = self._seating.reservation.over_limit()
        tenant = self._seating.tenant_caps.over_limit()
        if above is None and tenant is None:
            return None
        for job in self._running.by_eviction():
            if above is not None and job.level > above:
                return job, "reservation"
            if job.tenant == tenant:
                return job, "tenant_cap"
        return None

    def _entitled_level(self, job: Job) -> int | None:
        """The level at which `job` may preempt; None if it may not."""
        if job.level_source is not LevelSource.INSTANT or job.prediction is None:
            return job.level
        knobs = self._policy.predictor.instant
        return preempting_level(job.prediction.urgency, job.level, knobs)

    def _affordable_seconds(self, job: Job, need: Need) -> float:
        """Engine time that a victim for `job` may cost."""
        levels = self._seating.holdings.levels()
        lost = sum(worth * held.seats for worth, held in zip(self._worth.lost, levels, strict=True))
        seats, blocks = (
            sum(getattr(held, name) for held in levels) for name in ("seats", "blocks")
        )
        # Running jobs that must end by themselves to make the room.
        ends = max(1.0, need.seats, need.blocks * seats / blocks if blocks else 0.0)
        return ends * self._gap * self._worth.gained[job.level] / max(lost, 1.0)

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
