"""One scheduling step: every decision before the engine runs, in the order of `step`.

A snapshot of the engine goes in and orders come out (`snapshot.py`, `orders.py`). The decisions
read the snapshot, change only the state of the policy, and order once. Engine and simulator differ
in who takes the snapshot and who carries the orders out.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from vllm_semantic_sched.policy import prefills
from vllm_semantic_sched.policy.core import URGENT, SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.holds import choose as holds
from vllm_semantic_sched.policy.orders import NO_LIMITS, End, Orders, PrefillLimits, Victim
from vllm_semantic_sched.policy.overload.control import Ended
from vllm_semantic_sched.policy.overload.refusal import DROPPED
from vllm_semantic_sched.policy.preemption import Plans
from vllm_semantic_sched.policy.retention import PreemptionKind
from vllm_semantic_sched.policy.snapshot import Room, Snapshot

# Seconds of text, at a tier's `pace`, that an answer must be ahead of its reader to need no
# protection.
_READING_BUFFER = 2.0

Guard = Callable[[str], AbstractContextManager[object]]
"""Guards a block against exceptions, by the code of its task; the rest goes on."""


def step(core: SchedulingCore, snapshot: Snapshot, now: float, guard: Guard) -> Orders:
    """Every decision before an engine step, at the time `now` of `Job.arrival`."""
    decisions = _Step(core, snapshot, now)
    # The previous step is over: whatever is stored from here on is stored at the present time.
    with guard("virtual_time"):
        core.tick()
    # Everything after uses the level and the length that are known now.
    with guard("predictions"):
        decisions.read_predictions(guard)
    # Outlived estimates, promotions by waiting, some more jobs ranked by a new policy. Jobs that
    # changed are judged again by the limits of their tier.
    with guard("estimates"):
        decisions.revise_estimates()
    # Before room is made: no running request is preempted for one that ends in this step.
    with guard("overdue"):
        decisions.end_overdue()
    # What outgrew a hard reservation or its tenant's cap is free when room is made.
    with guard("reservations"):
        decisions.keep_reservations()
    idle = False
    with guard("idle_check"):
        idle = decisions.nothing_to_decide()
    if not idle and core.policy.rank_uncached:
        # Who is next depends on what the prefix cache holds now.
        with guard("cached_work"):
            core.refresh_cached(snapshot.cached_tokens)
    if not idle:
        # Running requests are preempted for more urgent waiting ones (`policy.preemption`).
        with guard("room"):
            decisions.make_room()
    # Those that were just preempted need no hold.
    with guard("holds"):
        decisions.hold()
    # Last, because it depends on who runs and who is next.
    with guard("prefill_limits"):
        decisions.limit_prefills(idle)
    orders = decisions.orders
    orders.moved, core.moved = core.moved, {}
    return orders


def repeat(core: SchedulingCore, now: float) -> None:
    """Begin a step that orders nothing, as the last one did, because no job has come, gone or moved
    since, and no timer is due."""
    core.tick()
    if core.protection.enabled:
        core.protection.begin_step(now, busy=len(core.running) > 0)


def arrived(
    core: SchedulingCore,
    snapshot: Snapshot,
    job: Job,
    dedup_key: str | None = None,
    origin: str = "",
) -> list[End]:
    """Admit or refuse a newly queued job, between two steps; others may end because of it.
    `dedup_key`, `origin`: see `policy.overload.dedup`."""
    if core.overload is None:
        return []
    decisions = _Step(core, snapshot, job.arrival)
    seats = decisions.open_seats
    decisions.end(core.overload.admit(job, job.arrival, seats, dedup_key, origin))
    return decisions.orders.end


def assign(
    core: SchedulingCore, snapshot: Snapshot, job: Job, level: int, by: str = "", why: str = ""
) -> None:
    """Give a waiting or running job the level that an operator sets, between two steps. The next
    step decides by it. `by`, `why`: for the event log."""
    if job.state is JobState.RUNNING:
        Plans(core.plan_preemption, core.profile, snapshot).observe(job)
    core.assign(job, level, by, why)
    if core.overload is not None:
        core.overload.reassigned(job)


def preempt(
    core: SchedulingCore, snapshot: Snapshot, job: Job, reason: str, beneficiary: Job
) -> Victim:
    """Plan and record the preemption of a running job that the engine has decided on by itself; the
    engine carries it out."""
    decisions = _Step(core, snapshot, core.lifecycle.clock())
    decisions.preempt(job, reason, beneficiary)
    return decisions.orders.preempt[0]


def filled(core: SchedulingCore, snapshot: Snapshot, tokens_left: bool = False) -> None:
    """Take in how the engine has filled a step. `tokens_left`: it would have taken more tokens."""
    if (waits := core.lifecycle.waits) is not None:
        waits.end_step()
        waits.limit(core.waiting.limited())
        waits.because(_why_waiting(core, snapshot))
    if not tokens_left:
        return
    newcomer = core.waiting.peek()
    if newcomer is None or newcomer is not core.next_job or not snapshot.reserved_blocks:
        return
    ready = snapshot.is_ready(newcomer) and not snapshot.obstacles(newcomer)
    if ready and not snapshot.paused and Room(snapshot).holds(newcomer):
        core.eviction.passed_over = newcomer


def achieved_nothing(core: SchedulingCore) -> None:
    """The step computed no token although jobs sat out: nobody does in the next one."""
    core.protection.achieved_nothing()
    core.sharing.achieved_nothing()


class _Step:
    """The parts of a step, with what they share."""

    def __init__(self, core: SchedulingCore, snapshot: Snapshot, now: float) -> None:
        self._core = core
        self._snapshot = snapshot
        self._now = now
        self._room = Room(snapshot)
        self._plans = Plans(core.plan_preemption, core.profile, snapshot)
        self._holds = holds.Holds()
        self._watching = False  # whether the next steps may hold some, too
        self.orders = Orders()

    def read_predictions(self, guard: Guard) -> None:
        """Apply the predictions that have come back."""
        changed: list[Job] = []
        for job, prediction in self._snapshot.predictions:
            # One by one: an error costs one prediction, not all that came with it.
            with guard("prediction"):
                self._read(job, prediction)
                changed.append(job)
        self._judge_again(changed)

    def _read(self, job: Job, prediction: Prediction | None) -> None:
        core = self._core
        if job.state is JobState.RUNNING:
            self._plans.observe(job)
        core.predicted(job, prediction)
        core.moved[job] = None

    def revise_estimates(self) -> None:
        """Let the timers that are due do what they are for."""
        self._judge_again(self._core.revise(self._plans.observe, self._now))

    def _judge_again(self, jobs: Iterable[Job]) -> None:
        """Apply the bounds of admission to jobs whose estimates have changed."""
        overload = self._core.overload
        if overload is None:
            return
        for job in jobs:
            if not job.state.is_end:
                self.end(overload.revised(job, self._now, self.open_seats))

    def end_overdue(self) -> None:
        """End jobs that have waited too long, or whose tier is shed."""
        overload = self._core.overload
        if overload is not None:
            self.end(overload.step(self._now, self._snapshot.kv_use))

    def end(self, ended: Iterable[Ended]) -> None:
        """Order the end of jobs, as far as their clients can be told."""
        for job, refusal in ended:
            if not self._snapshot.can_end(job):
                continue
            if job.state is JobState.RUNNING:
                self._plans.observe(job)
                self._room.free(job)
            self.orders.end.append(End(job, refusal))
            self._core.refuse(job, refusal)

    def open_seats(self) -> int:
        """Seats for new requests; none while the queue is paused."""
        return 0 if self._snapshot.paused else max(0, self._room.seats)

    def keep_reservations(self) -> None:
        """Preempt what outgrew a hard reservation, or its tenant's cap."""
        if not self._core.seating.has_limits:
            return
        while (over_quota := self._core.eviction.over_quota_job()) is not None:
            job, reason = over_quota
            if self._snapshot.freeable_blocks(job) is None:
                break
            self.preempt(job, reason)

    def nothing_to_decide(self) -> bool:
        """Whether the step can only decode. Most are like that, and asking all questions in them
        would double the time of a simulation."""
        core, snapshot = self._core, self._snapshot
        if core.with_kv and snapshot.loaded:
            return False
        if snapshot.prefilling:
            return False
        if not len(core.waiting):
            return True
        nobody_starts = self._room.seats <= 0 or core.waiting.peek() is None
        return nobody_starts and not core.eviction.wants_room

    def make_room(self) -> None:
        """Preempt running jobs for more urgent ones, and keep the seats for these."""
        core, snapshot, room, plans = self._core, self._snapshot, self._room, self._plans
        clearing: Job | None = None
        if not snapshot.paused:
            loaded = snapshot.loaded if core.with_kv else ()
            if loaded:
                seats = room.seats + len(loaded)
                self._preempt_for(core.eviction.claim_seats(loaded, seats, snapshot, plans))
            head = core.waiting.peek()
            if head is not None and len(core.with_kv):
                for session in core.eviction.idle_for(head, snapshot, room):
                    self._release(session)
            if core.eviction.wants_room:
                # Those behind the head leave it the next seat (`_keep_seats`).
                level = math.inf if head is None else head.effective_level
                seats = room.seats + sum(job.effective_level > level for job in loaded)
                prefill_tokens = snapshot.token_budget - len(core.running)
                choice = core.eviction.choose(snapshot, room, plans, seats, prefill_tokens)
                self._preempt_for(choice.victims)
                clearing = choice.clearing
        self._keep_seats(clearing)

    def _preempt_for(self, victims: dict[Job, Job]) -> None:
        for victim, beneficiary in victims.items():
            self.preempt(victim, URGENT, beneficiary)

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        """Order that a running job gives up its seat; the policy counts it as waiting."""
        core = self._core
        plan = self._plans.carry_out(job)
        self._room.free(job)
        victim = Victim(job, plan, reason, beneficiary, core.is_thrashing(job))
        self.orders.preempt.append(victim)
        core.preempt(job, plan, reason, beneficiary)
        core.requeue(job, core.waiting)
        if plan.kind is PreemptionKind.DROP:
            core.refuse(job, DROPPED)

    def _release(self, session: Job) -> None:
        self._room.free(session, seats=0)
        self.orders.release.append(session)

    def _keep_seats(self, clearing: Job | None) -> None:
        """Keep seats for jobs that are about to return, and for a more urgent newcomer."""
        core, snapshot, room = self._core, self._snapshot, self._room
        self.orders.keep_seats_for = [*snapshot.returning, *self._victims_with_output_in_flight()]
        newcomer = core.next_job = core.waiting.peek()
        if newcomer is None:
            return
        if clearing is not None:
            self.orders.first = clearing  # else others would take what is being freed for it
            return
        loaded = snapshot.loaded if core.with_kv else ()
        seats = room.seats + len(loaded)
        if not loaded or not 0 < seats <= len(loaded) or newcomer is core.was_first:
            core.was_first = None
            return
        needed = room.needed_blocks(newcomer)
        if newcomer.effective_level < loaded[0].effective_level and needed <= room.blocks:
            self.orders.first = newcomer
            core.was_first = newcomer  # once: if it does not start, those with KV go on

    def _victims_with_output_in_flight(self) -> list[Job]:
        """They cannot be seated before it has come."""
        jobs = []
        for victim in self.orders.preempt:
            progress = self._snapshot.progress(victim.job)
            if progress.computed > progress.with_kv and not victim.job.state.is_end:
                jobs.append(victim.job)
        return jobs

    def hold(self) -> None:
        """Choose decoding jobs to hold."""
        core, protection = self._core, self._core.protection
        self._watching = core.may_hold
        if not protection.enabled:
            return
        affordable = protection.begin_step(self._now, busy=len(core.running) > 0)
        # A paused engine waits for all that run, the most urgent ones or not.
        if not affordable or not self._watching or self._snapshot.paused:
            return
        newcomer = core.waiting.peek()  # none where a limit keeps all from starting
        if newcomer is not None and self._room.holds(newcomer):
            return
        worth = core.seating.worth
        paced = any([tier.pace is not None for tier in core.policy.all_tiers])
        losing = sum(
            worth_lost * core.requests(level) for level, worth_lost in enumerate(worth.lost)
        )
        self._holds = holds.choose(
            protection,
            core.profile,
            worth,
            losing=losing,
            snapshot=self._snapshot,
            running=self._running_by_urgency(),
            is_ahead=self._is_ahead_of_reader if paced else None,
        )

    def _is_ahead_of_reader(self, job: Job) -> bool:
        """Whether the reader of an answer has text for some time, at the pace of its tier."""
        pace = self._core.policy.all_tiers[job.level].pace
        if pace is None or job.first_token is None:
            return False
        self._plans.observe(job)
        return job.generated > pace * (self._now - job.first_token + _READING_BUFFER)

    def limit_prefills(self, idle: bool) -> None:
        """Bound the prefills of the step, and record who sits it out. `idle`: there was nothing to
        decide so far."""
        core, orders, (held, protected) = self._core, self.orders, self._holds
        limits = NO_LIMITS
        if not idle or self._watching:
            limits = self._prefill_limits()
        sit_out = dict.fromkeys(held, protected) | dict.fromkeys(limits.held, limits.beneficiary)
        orders.hold, orders.prefills = list(sit_out), limits
        moved = core.hold(sit_out, self._now)
        core.moved.update(dict.fromkeys(moved))
        orders.settled = idle and not self._watching and not moved

    def _prefill_limits(self) -> PrefillLimits:
        core, snapshot = self._core, self._snapshot
        prefilling = [job for job in snapshot.prefilling if job in core.running]
        for job in prefilling:
            self._plans.observe(job)
        limits, newcomer = NO_LIMITS, core.waiting.peek()
        if core.gated_level is not None and core.policy.uses_urgency:
            first = next(iter(self._running_by_urgency()), None)
            limits = prefills.gate(core.gated_level, prefilling, newcomer, first)
        if not limits.gated:
            leaving = [victim.job for victim in self.orders.preempt]
            leaving += self._holds.jobs
            by_urgency = core.policy.uses_urgency
            limits = core.sharing.limits(snapshot, self._room, prefilling, leaving, by_urgency)
        if core.has_protected:
            jobs = prefilling if newcomer is None else [newcomer, *prefilling]
            self.orders.protected_prefill = any(map(core.protection.protects, jobs))
        return limits

    def _running_by_urgency(self) -> list[Job]:
        """The jobs that keep their seats, most urgent first."""
        core, running = self._core, self._snapshot.running
        if self.orders.empty and not any(map(core.running.__contains__, core.moved)):
            return list(running)
        staying = filter(core.running.__contains__, running)
        return sorted(staying, key=core.running.order)


def _why_waiting(core: SchedulingCore, snapshot: Snapshot) -> Cause:
    if snapshot.paused:
        return Cause.PAUSED
    if snapshot.seats <= 0:
        return Cause.SEAT
    if not len(core.waiting):
        return Cause.STEP
    newcomer = core.waiting.peek()
    if newcomer is None:  # a limit counts for those that it concerns
        return Cause.KV_PEAK
    return Cause.TOKENS if Room(snapshot).holds(newcomer) else Cause.KV
