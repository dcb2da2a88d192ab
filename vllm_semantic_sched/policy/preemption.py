"""Which waiting jobs may preempt, and which running ones make room for them (paper, Alg. 4)."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.eviction import Preemption
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.seating import Seating
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.retention import HostRoom, PreemptionPlan
from vllm_semantic_sched.policy.snapshot import Room, Snapshot

# Plans for a running job with so many tokens of KV: see `SchedulingCore.plan_preemption`.
MakePlan = Callable[[Job, int, HostRoom | None, bool], PreemptionPlan]

_RATE = 0.1  # weight of the latest gap between two seats that came free
# Victims in one step, of those that make room for newcomers: each costs the step the time to choose
# it and to save its KV, and those of the next step are chosen a few milliseconds later.
_MOST_VICTIMS = 8
_COMPARED = 64  # jobs of a level among which the cheapest victim is searched
_PREEMPTION_TOKENS = 500  # output tokens that a preemption counts as, with `victim: progress` (S3)
_LOOKAHEAD = 64  # waiting jobs that a step examines to make room for them
_PASSED = 8  # of these, jobs without the right to preempt that a step passes over


class Priced(NamedTuple):
    """A plan, and what it costs."""

    plan: PreemptionPlan
    seconds: float  # of the engine: what a step in flight computes for the job is lost, too


class Plans:
    """What becomes of each victim of a step, planned once, when a decision first asks."""

    def __init__(self, make: MakePlan, profile: EngineProfile, snapshot: Snapshot) -> None:
        self._make = make
        self._profile = profile
        self._snapshot = snapshot
        self._priced: dict[Job, Priced] = {}
        self._taken = 0  # blocks on the host, by victims of this step

    def observe(self, job: Job) -> None:
        """Bring a running job's `generated` and `computed` up to date."""
        progress = self._snapshot.progress(job)
        job.computed, job.generated = progress.computed, progress.generated

    def seconds(self, job: Job) -> float:
        """Engine seconds that the preemption of a running job costs."""
        return self._price(job).seconds

    def carry_out(self, job: Job) -> PreemptionPlan:
        """The plan for a running job that is preempted now. What it takes on the host, later plans
        do not get."""
        plan, progress = self._price(job).plan, self._snapshot.progress(job)
        job.computed, job.generated = progress.with_kv, progress.generated
        if plan.saved:
            room = self._snapshot.host_room(job, plan.saved)
            assert room is not None
            self._taken += -(-plan.saved // room.block_size)
            self._priced.clear()
        return plan

    def _price(self, job: Job) -> Priced:
        priced = self._priced.get(job)
        if priced is None:
            priced = self._priced[job] = self._plan(job)
        return priced

    def _plan(self, job: Job) -> Priced:
        snapshot, progress = self._snapshot, self._snapshot.progress(job)
        job.computed, job.generated = progress.with_kv, progress.generated
        room = snapshot.host_room(job, progress.with_kv)
        if room is not None and self._taken:
            room = room._replace(blocks=max(0, room.blocks - self._taken))
        plan = self._make(job, progress.with_kv, room, snapshot.can_end(job))
        lost = 0.0
        if progress.computed > progress.with_kv:
            lost = self._profile.prefill(progress.with_kv, progress.computed)
        return Priced(plan, plan.seconds + lost)


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
    """Choose at most `max_victims` that make room for a new job of `level`.

    Victims come off the eviction heap, least urgent first. Each is at least `min_level_gap` levels
    less urgent than the new job and was not preempted too often; `gives_way` lifts both
    protections from less urgent jobs. What a job gained by waiting protects it. The result is empty
    if the eligible jobs do not suffice, and omits victims that later ones made unnecessary.

    Args:
        freeable_blocks: KV blocks that a job would free; None if it cannot be preempted now.
        order: of the jobs of a level, lowest first; None: most remaining time first.
        gives_way: whether a job has no protection; None: all jobs have it.
        among_equals: whether jobs that give way may be as urgent as the new job.
        droppable: whether a job that was preempted too often is ended rather than protected.
    """
    by_rank = running.by_eviction()
    chosen: list[tuple[Job, int]] = []
    blocks = 0
    for job in by_rank if order is None else _lowest_first(by_rank, order):
        enough = len(chosen) >= need.seats and blocks >= need.blocks
        if enough or len(chosen) == max_victims:
            break
        its_level = job.effective_level
        near = its_level < level + limits.min_level_gap
        above = its_level < level or (its_level == level and not among_equals)
        if above or (near and gives_way is None):
            break  # all others are at least as urgent
        protected = near or (job.preempted.urgent >= limits.max_per_request and not droppable(job))
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
    for victim in reversed(chosen):  # spare the most urgent first
        if len(kept) > need.seats and blocks - victim[1] >= need.blocks:
            kept.remove(victim)
            blocks -= victim[1]
    return [job for job, _ in kept]


class Choice(NamedTuple):
    """Running jobs to preempt before a step."""

    victims: dict[Job, Job]  # each with the waiting job that it makes room for
    clearing: Job | None = None  # a waiting job for which part of what it lacks comes free


class Eviction:
    """Decides which waiting jobs may preempt, and which running ones make room for them.

    Args:
        seconds_left: predicted seconds of work left for a waiting job, on the scale of
            `RunningSet.remaining`.
    """

    def __init__(
        self, running: RunningSet, seating: Seating, seconds_left: Callable[[Job], float]
    ) -> None:
        self._running = running
        self._seating = seating
        self._seconds_left = seconds_left
        self._freed_at: float | None = None
        self._gap = math.inf  # mean seconds until a seat comes free by itself
        # It found no victim worth a seat, and none came free since: policy, job, entitled level,
        # whether the cost counts.
        self._unpaid: tuple[Policy, Job, int | None, bool] | None = None
        # The engine did not start it although it had room: it may need more than that.
        self.passed_over: Job | None = None

    def seat_freed(self, now: float) -> None:
        """Record that a running job ended."""
        if self._freed_at is not None:
            gap = now - self._freed_at
            self._gap = gap if self._gap == math.inf else self._gap + _RATE * (gap - self._gap)
        self._freed_at = now
        self._unpaid = self.passed_over = None

    def reconsider(self) -> None:
        """Look for victims again: the level of a running or waiting job has changed."""
        self._unpaid = None

    # The right to preempt

    @property
    def wants_room(self) -> bool:
        """Whether any waiting job may preempt a running one. O(levels)."""
        waiting, limits = self._seating.waiting, self._seating.policy.preemption
        if self._seating.credits.may_take_seats and limits.enabled:
            return True
        worst = self._running.least_urgent()
        if worst is None:
            return False
        level = worst.effective_level
        if any(self._level_may_preempt(above, level) for above in waiting.levels):
            return True
        head = waiting.peek() if limits.shorter is not None else None
        return head is not None and self._is_much_shorter(head, worst)

    def worth_preempting(self, job: Job) -> bool:
        """Whether `job` may preempt some running job. O(1).

        Its own level counts. What it gained by waiting, by a near deadline or by its tier's share
        gets it the next free seat but no preemption, unless `tiers[].slo.takes_seats` allows it.
        The offset of a tier over its share counts against it. A provisional level counts as far
        as it is probable (`predictor.instant`).
        """
        seating = self._seating
        if job in seating.credits.may_take_seats and seating.policy.preemption.enabled:
            return True
        level, worst = job.entitled_level, self._running.least_urgent()
        if level is None or worst is None:
            return False
        may_preempt = self._level_may_preempt(level, worst.effective_level)
        return may_preempt or self._is_much_shorter(job, worst)

    def held_back(self, job: Job) -> bool:
        """Whether `job` may not preempt only because its level is provisional."""
        worst = self._running.least_urgent()
        if job.entitled_level == job.level or worst is None:
            return False
        final_level_may = self._level_may_preempt(job.level, worst.effective_level)
        return final_level_may and not self.worth_preempting(job)

    def _level_may_preempt(self, level: int, worst: float) -> bool:
        """Whether jobs of `level` may preempt one of the effective level `worst`."""
        policy = self._seating.policy
        rules = policy.preemption
        if not rules.enabled or not policy.uses_urgency:
            return False
        gap = worst - self._seating.preempting_level(level)
        if gap <= 0:
            return False
        limits = self._seating.limits
        if limits.table.reserves and limits.lent(level):
            return True
        # Weighted levels are one level: a seat that a short request got is not taken back at once.
        return gap >= rules.min_level_gap and not policy.weighs(level)

    def _is_much_shorter(self, job: Job, worst: Job) -> bool:
        if worst.effective_level < self._seating.preempting_level(job.level):
            return False
        return self._running.remaining(worst) >= self._much_longer_than(job)

    def _much_longer_than(self, job: Job) -> float:
        """Remaining seconds from which a running job gives way to `job`; inf: never."""
        policy, limits = self._seating.policy, self._seating.policy.preemption
        if limits.shorter is None or not limits.enabled or policy.base != "semantic":
            return math.inf
        weighted = policy.weighs(job.level)
        return math.inf if weighted else limits.shorter * self._seconds_left(job)

    # The choice of victims

    def choose(
        self, snapshot: Snapshot, room: Room, plans: Plans, seats: int, prefill_tokens: float
    ) -> Choice:
        """Choose victims for waiting jobs, down the queue as far as jobs can be admitted in this
        step. Subtracts what each takes from the free `seats` and `prefill_tokens` and from the
        blocks that are free now or after the steps in flight: also jobs that age, deadline or share
        put before more urgent ones, though no job is preempted for them."""
        blocks = room.blocks_in_all
        seating = self._seating
        victims: dict[Job, Job] = {}
        clearing: Job | None = None
        passed = 0
        for job in itertools.islice(seating.waiting.ordered(), _LOOKAHEAD):
            if prefill_tokens <= 0:
                break
            entitled = self.worth_preempting(job)
            if not entitled:
                passed += 1
                out_of_order = seating.reorders_levels or self.held_back(job)
                if passed > (_PASSED if out_of_order else 0):
                    break
            if seating.used.table.kv_peak and not seating.kv_peak.admits(job):
                break
            if not snapshot.is_ready(job) or not seating.limits.admits_tenant(job):
                continue
            groups = snapshot.obstacles(job)
            if groups and not entitled:
                continue
            needed = self.needed_blocks(job, snapshot, room)
            # What the engine lacks, or more if less urgent tiers use up their part beside a hard
            # reservation.
            missing = seating.shortage(job)
            need = Need(max(1 - seats, missing.seats), max(needed - blocks, missing.blocks))
            if groups or (entitled and not need.met):
                chosen = self.victims_for(job, need, snapshot, plans, victims, groups)
                if not chosen and not groups:
                    break
                if not chosen:
                    continue
                if groups and not any(set(group) <= set(chosen) for group in groups):
                    clearing = job
                victims |= dict.fromkeys(chosen, job)
                seats += len(chosen)
                blocks += sum(snapshot.freeable_blocks(victim) or 0 for victim in chosen)
            seats -= 1
            blocks -= needed
            prefill_tokens -= job.tokens
        return Choice(victims, clearing)

    def needed_blocks(self, job: Job, snapshot: Snapshot, room: Room) -> int:
        """KV blocks for a waiting job. For one that was passed over with room for it also those
        that the engine sets aside for running prefills: it may load KV."""
        reserved = snapshot.reserved_blocks if job is self.passed_over else 0
        return room.needed_blocks(job) + reserved

    def idle_for(self, job: Job, snapshot: Snapshot, room: Room) -> list[Job]:
        """Idle sessions, less urgent than the next waiting job, whose KV makes room for it: what
        they hold is no more than a cache. None if that is not enough and `job` may not preempt
        running jobs besides."""
        if not (sessions := snapshot.idle):
            return []
        missing = self.needed_blocks(job, snapshot, room) - room.blocks_in_all
        given_up: list[Job] = []
        for session in sessions:
            if missing <= 0 or session.effective_level <= job.effective_level:
                break
            freed = snapshot.freeable_blocks(session)
            if freed:
                given_up.append(session)
                missing -= freed
        return given_up if missing <= 0 or self.worth_preempting(job) else []

    def claim_seats(
        self, loaded: Sequence[Job], seats: int, snapshot: Snapshot, plans: Plans
    ) -> dict[Job, Job]:
        """Victims for jobs whose KV is complete on the device, the most urgent first: the seat that
        one of them had may be taken. `seats`: free ones."""
        victims: dict[Job, Job] = {}
        for job in loaded:
            if seats <= 0 and self.worth_preempting(job):
                chosen = self.victims_for(job, Need(1 - seats, 0), snapshot, plans, victims)
                victims |= dict.fromkeys(chosen, job)
                seats += len(chosen)
            seats -= 1
        return victims

    def victims_for(
        self,
        job: Job,
        need: Need,
        snapshot: Snapshot,
        plans: Plans,
        beside: Collection[Job] = (),
        groups: Sequence[Collection[Job]] = (),
    ) -> list[Job]:
        """Victims for a waiting job, see `choose_victims`; empty if it gets none.

        A victim must be worth its seat: the engine time that its preemption costs all running jobs
        is worth less than the time that `job` would wait for room to come free. What a deadline or
        a reservation entitles to is not weighed, nor is a victim that ends (`after_limit`). Victims
        chosen in this step for others (`beside`) are left out. Of `groups` (`obstacles`), one is
        among them: the smallest that may be preempted, whole, or the first part of it that a step
        may preempt.
        """
        takes_seat = job in self._seating.credits.may_take_seats
        unweighed = takes_seat or self._seating.limits.borrowed_from(job.level) is not None
        asked = (self._seating.policy, job, job.entitled_level, unweighed)
        if self._unpaid == asked:
            return []
        affordable = math.inf if unweighed else self._affordable_seconds(job, need)

        def freeable(victim: Job) -> int | None:
            if not self._seating.policy.all_tiers[victim.level].preemptible:
                return None
            if not self._is_worth_a_seat(victim, plans, affordable):
                self._unpaid = asked
                return None
            return None if victim in beside else snapshot.freeable_blocks(victim)

        most = _MOST_VICTIMS - len(beside)
        if groups:
            victims = self._smallest(groups, job, plans, freeable)[:most]
        else:
            victims = self._choose(need, most, job, plans, freeable)
        if victims:
            self._unpaid = None
        return victims

    def _smallest(
        self,
        groups: Sequence[Collection[Job]],
        job: Job,
        plans: Plans,
        freeable: Callable[[Job], int | None],
    ) -> list[Job]:
        """The smallest group all of whose jobs may be preempted."""
        for group in sorted(groups, key=len):

            def among(victim: Job, group: Collection[Job] = group) -> int | None:
                return freeable(victim) if victim in group else None

            victims = self._choose(Need(len(group), 0), len(group), job, plans, among)
            if victims:
                return victims
        return []

    def _choose(
        self,
        need: Need,
        most: int,
        job: Job,
        plans: Plans,
        freeable: Callable[[Job], int | None],
    ) -> list[Job]:
        """See `choose_victims`."""
        level, longer_than = job.entitled_level, self._much_longer_than(job)
        takes_seat = job in self._seating.credits.may_take_seats
        borrowed = self._seating.limits.borrowed_from(job.level)
        return choose_victims(
            # Without an entitled level it takes a seat by its deadline.
            self._seating.preempting_level(job.level if level is None else level),
            need,
            self._running,
            self._seating.policy.preemption,
            most,
            freeable,
            order=self._order_of_victims(plans),
            gives_way=self._gives_way(takes_seat, longer_than, borrowed),
            among_equals=takes_seat or longer_than < math.inf,
            droppable=self._is_droppable,
        )

    def _order_of_victims(self, plans: Plans) -> Callable[[Job], float] | None:
        """The order of victims of one level; None: by rank."""

        def progress(victim: Job) -> float:
            plans.observe(victim)
            return victim.generated + _PREEMPTION_TOKENS * victim.preempted.times

        orders = {"cost": plans.seconds, "progress": progress}
        return orders.get(self._seating.policy.preemption.victim)

    def _is_droppable(self, victim: Job) -> bool:
        """Whether one more preemption than allowed ends a job."""
        policy = self._seating.policy
        return policy.preemption.after_limit == "drop" and policy.all_tiers[victim.level].drop

    def _is_worth_a_seat(self, victim: Job, plans: Plans, affordable: float) -> bool:
        """Whether the preemption of a job costs at most `affordable` seconds. One that ends it
        (`after_limit`) costs nothing."""
        limit = self._seating.policy.preemption.max_per_request
        ends = victim.preempted.urgent >= limit and self._is_droppable(victim)
        return ends or plans.seconds(victim) <= affordable

    def _gives_way(
        self, takes_seat: bool, longer_than: float, borrowed: Callable[[Job], bool] | None
    ) -> Callable[[Job], bool] | None:
        """Which running jobs have no protection against a waiting one; None: all have it."""
        if not takes_seat and longer_than == math.inf:
            return borrowed
        limit, remaining = self._seating.policy.preemption.max_per_request, self._running.remaining

        def gives_way(victim: Job) -> bool:
            answering = takes_seat and victim.first_token is not None
            if victim.preempted.urgent < limit and (answering or remaining(victim) >= longer_than):
                return True
            return borrowed is not None and borrowed(victim)

        return gives_way

    def over_quota_job(self) -> tuple[Job, str] | None:
        """A running job that must be preempted because a job grew or became less urgent, and the
        reason: `reservation` if less urgent tiers hold part of a hard reservation, `tenant_cap` if
        its tenant holds too much KV."""
        above = self._seating.limits.level_over_limit()
        tenant = self._seating.limits.tenant_over_limit()
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
        allocations, worth = self._seating.allocations, self._seating.worth
        levels, seats = allocations.levels, len(allocations)
        blocks = sum(held.blocks for held in levels)
        lost = sum(second * held.seats for second, held in zip(worth.lost, levels, strict=True))
        # Running jobs that must end by themselves to make the room.
        ends = max(1.0, need.seats, need.blocks * seats / blocks if blocks else 0.0)
        return ends * self._gap * worth.gained[job.level] / max(lost, 1.0)
