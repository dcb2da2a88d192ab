"""Chooses running jobs to preempt for waiting ones (paper, Alg. 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.eviction import Preemption
from vllm_semantic_sched.policy.estimates.decision import level_worth
from vllm_semantic_sched.policy.eviction.entitlement import Entitlement
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.running import RunningSet

# Weight of the latest gap between two seats that came free.
_RATE = 0.1

# Jobs of a level among which the cheapest victim is searched.
_COMPARED = 64

# Output tokens that an earlier preemption counts as, with `victim: progress` (S3).
_PREEMPTION_TOKENS = 500

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

    def observe(self, job: Job) -> None:
        """Bring a running job's `generated` and `computed` up to date."""

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
    order: Callable[[Job], float] | None = None,
    gives_way: Callable[[Job], bool] | None = None,
    among_equals: bool = False,
    droppable: Callable[[Job], bool] = lambda job: False,
) -> list[Job]:
    """Choose victims that make room for a new job of `level`.

    Victims come off the eviction heap, least urgent first. Each is at least `min_level_gap` levels
    less urgent than the new job and was not preempted too often; `gives_way` lifts both
    protections from less urgent jobs. What a job gained by waiting protects it. The result is empty
    if the eligible jobs do not suffice, and omits victims that later ones made unnecessary.

    Args:
        max_victims: most victims to return.
        freeable_blocks: KV blocks that a job would free; None if it cannot be preempted now.
        order: of the jobs of a level, lowest first; None: most remaining time first.
        gives_way: whether a job has no protection; None: all jobs have it.
        among_equals: whether jobs that give way may be as urgent as the new job.
        droppable: whether a job that was preempted too often is ended rather than protected.
    """
    by_rank = running.by_eviction()
    candidates = by_rank if order is None else _lowest_first(by_rank, order)
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
        protected = near or (job.preemptions >= limits.max_per_request and not droppable(job))
        if protected and (gives_way is None or not gives_way(job)):
            continue
        freed = freeable_blocks(job)
        if freed is not None:
            chosen.append((job, freed))
            blocks += freed
    if len(chosen) < need.seats or blocks < need.blocks:
        return []
    return _without_spare(chosen, blocks, need)


def _lowest_first(jobs: Iterable[Job], order: Callable[[Job], float]) -> Iterator[Job]:
    """The first jobs of each level by `order`, the others as given; lazily."""
    for _, same_level in itertools.groupby(jobs, key=lambda job: job.effective_level):
        yield from sorted(itertools.islice(same_level, _COMPARED), key=order)
        yield from same_level  # noqa: B031 - the jobs that were not compared


def _without_spare(chosen: list[tuple[Job, int]], blocks: int, need: Need) -> list[Job]:
    kept = list(chosen)
    # Spare the most urgent first.
    for victim in reversed(chosen):
        if len(kept) > need.seats and blocks - victim[1] >= need.blocks:
            kept.remove(victim)
            blocks -= victim[1]
    return [job for job, _ in kept]


class VictimEligibility(Entitlement):
    """Decides which running jobs may be preempted for which waiting ones. See `Entitlement` for
    the arguments."""

    _freed_at: float | None = None
    _gap = math.inf  # mean seconds until a seat comes free by itself
    _unpaid: Job | None = None  # found no victim worth a seat, and none came free since

    def adopt(self, policy: Policy) -> None:
        super().adopt(policy)
        self._worth = level_worth(policy)
        self._unpaid = None

    def seat_freed(self, now: float) -> None:
        """Record that a running job ended."""
        if self._freed_at is not None:
            gap = now - self._freed_at
            self._gap = gap if self._gap == math.inf else self._gap + _RATE * (gap - self._gap)
        self._freed_at = now
        self._unpaid = None

    def plan(self, room: Room, view: AdmissionView) -> dict[Job, Job]:
        """Running jobs to preempt before a step, each with the waiting one that it makes room for.
        vLLM itself never does that.

        Goes down the waiting queue as far as jobs can be admitted in this step, and subtracts what
        each takes from `room`. A job that age, deadline or its tier's share put before a more
        urgent one takes free room first, so it counts although no job is preempted for it.
        """
        seating = self._seating
        victims: dict[Job, Job] = {}
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
                victims |= dict.fromkeys(chosen, job)
                room.seats += len(chosen)
                room.blocks += sum(view.freeable_blocks(victim) or 0 for victim in chosen)
            room.seats -= 1
            room.blocks -= blocks
            room.prefill_tokens -= job.tokens
        return victims

    def victims_for(
        self, job: Job, need: Need, view: AdmissionView, beside: Collection[Job] = ()
    ) -> list[Job]:
        """Victims for a waiting job, see `choose_victims`; empty if it gets none.

        A victim must be worth its seat: the engine time that its preemption costs all running jobs
        is worth less than the time that `job` would wait for room to come free. What a deadline or
        a reservation entitles to is not weighed, nor is a victim that ends (`after_limit`).

        Args:
            beside: victims that were chosen in this step for others.
        """
        if job is self._unpaid:
            return []
        takes_seat = job in self._seating.deadlines.may_take_seats
        borrowed = self._seating.reservation.borrowed_from(job.level)
        unweighed = takes_seat or borrowed is not None
        affordable = math.inf if unweighed else self._affordable_seconds(job, need)
        limits = self._policy.preemption

        def freeable(victim: Job) -> int | None:
            if not self._policy.tier(victim.level).preemptible:
                return None
            ends = victim.preemptions >= limits.max_per_request and self._is_droppable(victim)
            if not ends and view.preemption_seconds(victim) > affordable:
                self._unpaid = job
                return None
            return None if victim in beside else view.freeable_blocks(victim)

        level = self._entitled_level(job)
        if level is None:
            level = job.level  # it takes a seat by its deadline
        longer_than = self._much_longer_than(job)
        among_equals = takes_seat or longer_than < math.inf
        victims = choose_victims(
            self._seating.preempting_level(level),
            need,
            self._running,
            limits,
            limits.max_victims_per_step - len(beside),
            freeable,
            self._order_of_victims(view),
            self._gives_way(takes_seat, longer_than, borrowed),
            among_equals,
            self._is_droppable,
        )
        if victims:
            self._unpaid = None
        return victims

    def _order_of_victims(self, view: AdmissionView) -> Callable[[Job], float] | None:
        """The order of victims of one level; None: by rank."""

        def progress(victim: Job) -> float:
            view.observe(victim)
            return victim.generated + _PREEMPTION_TOKENS * victim.preemptions

        orders = {"cost": view.preemption_seconds, "progress": progress}
        return orders.get(self._policy.preemption.victim)

    def _is_droppable(self, victim: Job) -> bool:
        """Whether one more preemption than allowed ends a job."""
        policy = self._policy
        return policy.preemption.after_limit == "drop" and policy.tier(victim.level).drop

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
