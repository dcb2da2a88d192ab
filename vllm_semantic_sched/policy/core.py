"""State of all jobs and the decisions about them; `step.py` has their order in a step."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.decision import Hint, read_hints
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import (
    FIRST,
    FREE_LENGTH,
    NO_DEADLINES,
    Draft,
    Floor,
    Job,
    JobState,
    LevelSource,
    Preempted,
    Rank,
    SessionTurn,
    StatedLength,
    rank_of,
)
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.holds.budget import Protection
from vllm_semantic_sched.policy.levels import LevelDecider
from vllm_semantic_sched.policy.order.inversions import Inversions
from vllm_semantic_sched.policy.order.queues import OrderingRules, ranks_only
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.seating import Seating
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS
from vllm_semantic_sched.policy.order.uncached import UncachedWork
from vllm_semantic_sched.policy.order.waiting import WaitingQueue
from vllm_semantic_sched.policy.overload.admission import ends_requests
from vllm_semantic_sched.policy.overload.control import OverloadControl
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.preemption import Eviction
from vllm_semantic_sched.policy.prefills import PrefillSharing
from vllm_semantic_sched.policy.profile.cost import drop_seconds
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.record.lifecycle import Lifecycle, Listener
from vllm_semantic_sched.policy.record.waits import WaitLedger
from vllm_semantic_sched.policy.retention import (
    HostRoom,
    PreemptionKind,
    PreemptionPlan,
    plan_preemption,
)
from vllm_semantic_sched.policy.sessions import Sessions

URGENT = "urgent"
"""Reason of a preemption for a more urgent request, which counts for `max_per_request`."""

# Looked up once: each arrival uses them, and a lookup of an enum's member costs as much as four
# calls before Python 3.12.
_RUNNING, _DEFAULT = JobState.RUNNING, LevelSource.DEFAULT

_THRASH_TOKENS = 16  # a job preempted again before it has so many new tokens is thrashing
_RERANKED_PER_STEP = 100  # jobs after a change of policy: about a millisecond of work


class SchedulingCore:
    """State of all jobs and decisions by the policy. Everything except `WaitingQueue.ordered` and
    `RunningSet.by_eviction` visits at most O(log n) jobs.

    Args:
        buckets: length buckets of the predictor; set later if it is still starting.
        clock: seconds, for the times of the lifecycle; decisions do not read it.
        on_error: told, in the except block, what failed; the rest goes on. None: errors are raised.
    """

    def __init__(
        self,
        policy: Policy,
        profile: EngineProfile,
        buckets: LengthBuckets | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self.policy_ref = PolicyRef(policy)
        # Decodes of this and more urgent levels keep less urgent prefills from a step (paper,
        # Alg. 2). None: none do. Only simulations set it: a busy server would prefill nothing.
        self.gated_level: int | None = None
        # The term of a rank after the level, for a baseline, in place of predicted seconds of work
        # left. Only simulations set it.
        self.rank_by: Callable[[Job], float] | None = None
        self.estimates = Estimator(self.policy_ref, profile)
        self.estimates.buckets = buckets
        self.protection = Protection(self.policy_ref, lambda: self.estimates.scale.certain)
        self.seating = Seating(self.policy_ref, self.estimates)
        self.waiting, self.allocations = self.seating.waiting, self.seating.allocations
        self.running = RunningSet(lambda: self.estimates.scale.given.gamma2)
        self.eviction = Eviction(self.running, self.seating, self.estimates.rank_seconds)
        self.lifecycle = Lifecycle(clock, on_error)
        self.sessions = Sessions(self.policy_ref)
        self.levels = LevelDecider(self.seating, self.lifecycle, self.sessions)
        self.overload: OverloadControl | None = None  # see `set_capacity`
        self.on_error = on_error
        self.sharing = PrefillSharing(self.running, self.waiting)
        self.moved: dict[Job, None] = {}  # have another place than the engine knows
        self.next_job: Job | None = None  # when the last step was decided
        self.was_first: Job | None = None  # that step kept a seat for it
        # Waiting jobs whose KV is on the device or on its way there: by rank alone, no limits.
        self.with_kv = WaitingQueue(OrderingRules(self.policy_ref, self.estimates, ranks_only))
        self.uncached = UncachedWork(self.waiting)
        self._sequence = itertools.count()
        self.outdated: list[Job] = []  # may still be ranked by the previous policy

    @property
    def policy(self) -> Policy:
        """The policy in force; see `switch`."""
        return self.policy_ref.policy

    def check(self, policy: Policy) -> None:
        """Raise PolicyError if the engine is too small for the reservations of a policy."""
        self.seating.limits.check(policy)

    def switch(self, policy: Policy, profile: EngineProfile) -> None:
        """Put a policy in force that `policy.live.check_live_change` accepts. All decisions use it
        at once; queued and running jobs get new keys over the coming steps, a bounded number in
        each. Levels from hints stay; predicted and default levels are decided again. PolicyError,
        with no effect, if `check` refuses it."""
        self.check(policy)
        self.policy_ref.switch(policy)
        if policy.sessions.memory is None:
            self.sessions.clear()
        self.estimates.use_profile(profile)
        self.seating.policy_changed()
        self.uncached.reset(policy.rank_uncached)
        # Popped from the end, so that running jobs come first.
        self.outdated = [*self.waiting, *self.running]

    @property
    def profile(self) -> EngineProfile:
        """The engine profile, corrected by measured steps."""
        return self.estimates.profile

    def set_capacity(
        self,
        capacity: EngineCapacity,
        tokens_per_step: int = 1,
        keeps_accounts: bool = True,
        seed: int = 0,
    ) -> None:
        """Set the engine's capacity, once, before the first request. PolicyError if reservations
        leave nothing for the other tiers.

        Args:
            tokens_per_step: most output tokens of one request in a step.
            keeps_accounts: whether to have an overload control even if the policy ends no request.
            seed: of random decisions about admission.
        """
        self.seating.set_capacity(capacity, tokens_per_step)
        if keeps_accounts or ends_requests(self.policy):
            self.overload = OverloadControl(
                self.policy_ref, self.estimates, self.seating.limits, capacity, seed
            )
            self.lifecycle.later_listeners.append(self.overload)

    def record_why(self, journal: Listener, clock: Callable[[], float] | None = None) -> None:
        """Record why requests wait and what decides; call it before the first request. `clock`:
        seconds, which pass during pauses as well; None: the policy's clock."""
        waits = WaitLedger(
            clock or self.lifecycle.clock,
            self.policy_ref.policy.levels,
            lambda: self.seating.has_limits,
        )
        self.lifecycle.journal = journal
        self.lifecycle.waits = waits

    def watch_order(self, inversions: Inversions) -> None:
        """Look for inversions of the order by urgency; call it before the first request."""
        self.seating.inversions = inversions
        self.lifecycle.later_listeners.append(inversions)

    def read_hints(self, extra_args: Any, priority: Any, tenant: str = ANONYMOUS) -> Hint:
        """See `estimates.decision.read_hints`."""
        return read_hints(
            extra_args,
            priority,
            self.policy_ref.policy.hints,
            self.policy_ref.policy.levels,
            self.policy_ref.policy.default_level,
            self.policy_ref.policy.service_tiers,
            tenant,
        )

    def draft(
        self,
        request_id: str,
        prompt_tokens: int,
        max_output_tokens: int,
        hint: Hint,
        awaits_prediction: bool,
        tenant: str = ANONYMOUS,
        stated: StatedLength = FREE_LENGTH,
        provisional: Prediction | None = None,
        session: SessionTurn | None = None,
    ) -> Job:
        """Create a job for a request that is on its way, for `arrive`. Safe on any thread.

        Args:
            max_output_tokens: the request's limit; `stated` may lower it.
            provisional: the instant reader's prediction, used as far as the policy allows.
            session: its turn, as `Sessions.begin` gave it; None: it belongs to no session.
        """
        if stated.longest is not None:
            max_output_tokens = min(max_output_tokens, stated.longest)
        job = Job(
            request_id,
            sequence=-1,
            arrival=0.0,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            level=self.policy_ref.policy.default_level if hint.level is None else hint.level,
            level_source=hint.source,
            stated=stated,
            awaits_prediction=awaits_prediction,
            tenant=tenant,
        )
        self.levels.glance(job, provisional)
        if session is not None:
            job.session = session
            self.levels.inherit(job)
        estimates = self.estimates
        job.draft = Draft(seconds=estimates.rank_seconds(job), tokens=estimates.tokens(job))
        return job

    def arrive(self, job: Job, now: float) -> Job:
        """Take in a drafted job, without queueing it; returns the job."""
        job.sequence = next(self._sequence)
        job.arrival = now
        if self.seating.used.table.top_cap and (
            job.level_source is not LevelSource.DEFAULT or not job.awaits_prediction
        ):
            job.level = self.levels.capped(job, job.level)
        if job.session is not None:
            self.sessions.arrived(job.session, now)
            latest = Floor(job.level, job.request_id, job.level_source, now)
            self.sessions.decided(job.session, latest)
        if self.lifecycle.journal is None:
            self.lifecycle.arrive(job)
        else:
            self.lifecycle.arrive(job, self.levels.explain(job))
        return job

    def turn(
        self,
        job: Job,
        prompt_tokens: int,
        max_output_tokens: int,
        hint: Hint,
        stated: StatedLength = FREE_LENGTH,
    ) -> None:
        """Record that a session has got its next input, which continues all that came before; the
        caller queues the job, or moves it to its new place. Without a hint its level stays, and so
        does one that an operator has set."""
        if job.state is JobState.RUNNING:  # the input was there before its turn ended
            self._leave(job)
            self.lifecycle.move(job, JobState.WAITING, "input")
        job.prompt_tokens, job.generated = prompt_tokens, 0
        job.stated, job.max_output_tokens = stated, max_output_tokens
        if stated.longest is not None:
            job.max_output_tokens = min(max_output_tokens, stated.longest)
        if hint.level is not None and job.level_source is not LevelSource.OPERATOR:
            self.levels.tell(job, hint.level, hint.source)

    # Queueing

    def enqueue(self, job: Job, queue: WaitingQueue) -> None:
        """Queue a job: in the unsorted buffer until its level is known, else by rank. One that
        returns (skipped, preempted) is ranked at once: the buffer stays in arrival order."""
        if job.state is _RUNNING:  # a session that gave up its seat to wait for input
            self._leave(job)
            self.lifecycle.move(job, JobState.WAITING, "input")
        if queue is not self.waiting:
            self._skip(job, lasting=True)
        draft, seconds = job.draft, None
        if draft is not None and self.rank_by is None:
            seconds, draft.seconds = draft.seconds, None
        if job.awaits_prediction and job.level_source is _DEFAULT and _is_fresh(job):
            queue.buffer(job)
        elif seconds is not None:
            queue.add(job, rank_of(self.policy_ref.policy.base, job.level, seconds, job.sequence))
        else:
            self.requeue(job, queue)
            return
        if queue is not self.waiting:
            return
        if self.policy_ref.policy.rank_uncached:
            self.uncached.add(job)
        if seconds is None:
            self.seating.wait(job)
        elif self.seating.watches_waiting.table:
            self.seating.wait_first(job)

    def requeue(self, job: Job, queue: WaitingQueue) -> None:
        """Queue a job again that could not be admitted in this step or was preempted."""
        aside = queue is not self.waiting
        if aside or job.seat is not None:
            self._skip(job, lasting=aside)
        queue.push(job, self.rank(job))
        if not aside:
            if self.policy_ref.policy.rank_uncached:
                self.uncached.add(job)
            self.seating.wait(job)

    def skip(self, job: Job, queue: WaitingQueue) -> Rank | None:
        """Take out a job that the engine cannot admit in this step, for `put_back`: without the
        accounts of one that starts. Returns its rank; None, with no effect, for a buffered one."""
        rank = queue.lift(job)
        if rank is not None:
            self._skip(job, lasting=queue is not self.waiting)
        return rank

    def put_back(self, job: Job, rank: Rank, queue: WaitingQueue) -> None:
        """Return a job that was skipped."""
        queue.add(job, rank)

    def set_aside(self, job: Job, queue: WaitingQueue) -> None:
        """Keep a waiting job out of the order, until `recall`: the engine cannot admit it, whatever
        comes free. No-op for a buffered one."""
        if queue.set_aside(job):
            self._skip(job, lasting=True)

    def recall(self, job: Job, queue: WaitingQueue) -> None:
        """Return a job that was set aside to its place; no-op if it was not."""
        waits = self.lifecycle.waits
        if not queue.recall(job) or queue is not self.waiting:
            return  # a job that holds KV counts as not ready until it starts
        if waits is not None and job.wait is not None:
            waits.ready(job.wait)

    def take(self, job: Job, queue: WaitingQueue) -> None:
        """Take out the job that `queue.peek` returned. It starts or returns in the same step."""
        if queue is self.waiting:
            self.seating.take(job)
        else:
            queue.remove(job)

    def predicted(self, job: Job, prediction: Prediction | None) -> None:
        """Apply a prediction, or its failure (None), and move the job to its new rank."""
        level = job.level
        self.levels.read(job, prediction)
        if job.level > level:
            self.eviction.reconsider()
        if job.deadlines is not NO_DEADLINES and job in self.waiting:
            self.seating.start_timers(job)  # when it must start depends on its predicted length
        self._rank_again(job)

    def assign(self, job: Job, level: int, by: str = "", why: str = "") -> None:
        """Give a waiting or running job, whose `computed` and `generated` are up to date, the level
        that an operator sets, and move it to its new rank. `by`, `why`: for the event log."""
        self.levels.assign(job, level, by, why)
        self._rank_again(job)
        self.eviction.reconsider()
        self.moved[job] = None

    # Running

    def start(self, job: Job) -> None:
        """Record that a job got a seat; its `computed` is up to date."""
        self.seating.start(job)
        job.swapped = job.cached = 0
        self.lifecycle.move(job, JobState.RUNNING)
        waits = self.lifecycle.waits
        if waits is not None:
            waits.seated(job.level)
            if job.preempted.times and job.seat is not None:
                job.seat.restoring = waits.clock()
        self._store_running(job)

    def rank_running(self, observe: Callable[[Job], object]) -> list[Job]:
        """Rank all running jobs anew, after `observe` has updated each; returns them."""
        running = list(self.running)
        for job in running:
            observe(job)
            self._store_running(job)
        return running

    def plan_preemption(
        self, job: Job, held: int, host: HostRoom | None = None, can_drop: bool = False
    ) -> PreemptionPlan:
        """Plan the preemption of a running job with KV of `held` tokens on the device. `can_drop`:
        whether the caller can end it; its tier must allow that too."""
        policy, profile = self.policy_ref.policy, self.estimates.scale.profile
        limits, dropping = policy.preemption, None
        if can_drop and policy.all_tiers[job.level].drop:
            dropping = drop_seconds(job, self.estimates.output_tokens(job), profile)
        at_limit = job.preempted.urgent >= limits.max_per_request
        must_end = limits.after_limit == "drop" and at_limit
        return plan_preemption(job, held, profile, policy.retention, host, dropping, must_end)

    def restored(self, job: Job) -> None:
        """Record that a preempted job has restored the KV that it lost."""
        waits = self.lifecycle.waits
        if waits is None or job.seat is None or job.seat.restoring is None:
            return
        seconds, job.seat.restoring = waits.clock() - job.seat.restoring, None
        self.lifecycle.note(job, "restored", {"restored": round(seconds, 6)})

    def is_thrashing(self, job: Job) -> bool:
        """Whether a job that was preempted has got few new tokens in its present seat."""
        before = 0 if job.seat is None else job.seat.generated
        return job.preempted.times > 0 and job.generated - before < _THRASH_TOKENS

    def preempt(
        self, job: Job, plan: PreemptionPlan, reason: str = "", beneficiary: Job | None = None
    ) -> None:
        """Take a running job's seat, for the `beneficiary` if that is known; the caller queues it
        again, or ends it if the plan says so."""
        self._leave(job)
        before, urgent = job.preempted, reason == URGENT
        job.preempted = Preempted(
            before.times + 1, before.urgent + urgent, before.seconds + plan.seconds
        )
        if urgent and plan.kind is not PreemptionKind.DROP:
            self.protection.spend(plan.seconds)
        limits = self.policy_ref.policy.preemption
        if limits.after_limit == "promote" and job.preempted.urgent >= limits.max_per_request:
            job.gain().preemptions = 1.0
        job.computed = plan.on_device
        job.swapped = plan.saved
        state = JobState.SWAPPED if plan.saved else JobState.WAITING
        self.lifecycle.move(job, state, reason, plan.kind.value, beneficiary)

    def lose_copy(self, job: Job) -> None:
        """Record that the host copy of a waiting job's KV is lost."""
        if job.state is not JobState.SWAPPED:
            return
        self.lifecycle.move(job, JobState.WAITING, "copy_lost")
        job.computed = job.swapped = 0
        self._rank_again(job)

    def first_token(self, job: Job) -> None:
        """Record a job's first token."""
        self.lifecycle.first_token(job)
        credit = job.credit
        if credit is None or not credit.deadline:
            return
        credit.deadline = 0.0
        if job in self.running:
            self._store_running(job)
            self.moved[job] = None

    def finish(
        self,
        job: Job,
        end: AnswerEnd,
        state: JobState = JobState.COMPLETED,
        reason: str = "",
        beneficiary: Job | None = None,
    ) -> None:
        """Record the end of a job whose `generated` is up to date, for the `beneficiary` that takes
        its place, if any. `end`: how far its length can be compared with its prediction."""
        self.waiting.remove(job)
        self.with_kv.remove(job)
        now = self.lifecycle.clock()
        if job in self.running:
            self.eviction.seat_freed(now)
        self._leave(job)
        self.lifecycle.move(job, state, reason, beneficiary=beneficiary)
        self.estimates.learn(job, end)

    def refuse(self, job: Job, refusal: Refusal) -> None:
        """End a job without its answer."""
        code = refusal.code.value
        self.finish(job, AnswerEnd.ABORTED, JobState.REFUSED, code, refusal.beneficiary)

    def forget(self, job: Job) -> None:
        """Drop a job that has ended, if recording its end failed; no-op if it did not."""
        if job in self.running:
            self._leave(job)
        self.waiting.remove(job)
        self.with_kv.remove(job)

    # Steps, in the order that `step.py` says

    def tick(self, steps: int = 1) -> None:
        """Advance virtual time by engine steps: one, or at most `steps_to_timer`."""
        self.running.tick(steps)
        if self.seating.used.table.kv_peak:
            self.seating.kv_peak.tick(steps)

    def revise(self, observe: Callable[[Job], None], now: float) -> list[Job]:
        """Bring estimates and ranks up to date; `observe` updates a job's `generated` and
        `computed`. Returns running jobs with a new rank (after outliving their estimate or a
        change of policy) and waiting jobs that a new policy puts at another level."""
        if not self.timer_is_due(now):  # as in most steps
            return []
        reranked, waiting = self._rerank_some() if self.outdated else ([], [])
        running = [*self.running.outlived(), *reranked]
        for job in running:
            observe(job)
            self._store_running(job)
        outgrown: list[Job] = []
        if self.seating.used.table.kv_peak:
            outgrown = self.seating.kv_peak.revise(observe)
        if outgrown:
            self.waiting.changed()
        promoted = self.seating.step(now, observe)
        for job in promoted:
            self._rank_again(job)
        changed = [*running, *waiting]
        self.moved.update(dict.fromkeys((*changed, *outgrown, *promoted)))
        return changed

    def refresh_cached(self, cached_tokens: Callable[[Job], int]) -> None:
        """Rank some waiting jobs by what the prefix cache holds of them now. `cached_tokens`: of a
        waiting job."""
        for job in self.uncached.refresh(cached_tokens):
            self.waiting.rerank(job, self.rank(job))

    def timer_is_due(self, now: float) -> bool:
        """Whether `revise` may do anything in the step that begins now, or in the present one."""
        seating = self.seating
        if self.outdated or self.running.may_outlive or seating.may_move(now):
            return True
        return seating.used.table.kv_peak and seating.kv_peak.may_outlive

    def steps_to_timer(self) -> int:
        """Coming steps in which no timer is due unless a job comes, goes or is predicted."""
        if self.outdated or not self.seating.timeless:
            return 0
        return min(self.running.steps_to_outlived, self.seating.kv_peak.steps_to_outlived)

    def hold(self, jobs: Mapping[Job, Job | None], now: float) -> list[Job]:
        """Record which running jobs sit out the coming step, each with the one for which it does.
        Returns those with a new place: not held any more, or promoted for being held."""
        held = self.protection.held
        if not jobs and not held:
            return []
        moved = [job for job in held if job not in jobs]
        for job in moved:
            self._release(job, now)
            if self.seating.credits.earn(job, job.waited):
                self._store_running(job)
        for job, beneficiary in jobs.items():
            assert job.seat is not None
            since = job.seat.held_since
            if since is None:
                job.seat.held_since, job.seat.held_for = now, beneficiary
                held[job] = None
                self.running.hold(job)
            elif self.seating.credits.earn(job, job.waited + (now - since)):
                self._store_running(job)
                moved.append(job)
        self.seating.meter.idle = len(held)
        return moved

    def _release(self, job: Job, now: float) -> None:
        del self.protection.held[job]
        assert job.seat is not None and job.seat.held_since is not None
        seconds, job.seat.held_since = now - job.seat.held_since, None
        self.running.release(job)
        job.waited += seconds
        self.lifecycle.held(job, seconds)
        job.seat.held_for = None

    def _leave(self, job: Job) -> None:
        """A job gives back its seat, if it has one."""
        if job in self.protection.held:
            self._release(job, self.lifecycle.clock())
        self.restored(job)  # as far as it came
        if self.running.discard(job):
            self.sharing.departed()
        self.seating.leave(job)

    def _skip(self, job: Job, lasting: bool) -> None:
        """The engine has found a job not ready; see `WaitLedger.skip`."""
        if job.wait is not None and self.lifecycle.waits is not None:
            self.lifecycle.waits.skip(job.wait, lasting)

    def _rerank_some(self) -> tuple[list[Job], list[Job]]:
        """Re-rank some more: running jobs, not stored yet, and waiting ones of another level."""
        running, waiting = [], []
        for _ in range(min(len(self.outdated), _RERANKED_PER_STEP)):
            job = self.outdated.pop()
            level = job.level
            self.levels.change(job, self.levels.decided(job))
            if job in self.waiting:
                self.seating.wait(job)  # intervals of its timers may have changed
                self.waiting.rerank(job, self.rank(job))
                if job.level != level:
                    waiting.append(job)
            elif job in self.running:
                running.append(job)
        return running, waiting

    def _rank_again(self, job: Job) -> None:
        """Move a job to its new rank, wherever it is stored."""
        if job in self.running:
            self._store_running(job)
            return
        for queue in (self.waiting, self.with_kv):
            if job in queue:
                queue.push(job, self.rank(job))

    def requests(self, level: int) -> int:
        """Number of requests of a level, running and waiting."""
        return self.allocations.levels[level].seats + self.lifecycle.waiting(level)

    @property
    def may_hold(self) -> bool:
        """Whether jobs may be held for protected ones. O(levels)."""
        return self.protection.enabled and self.has_protected and len(self.waiting) > 0

    @property
    def has_protected(self) -> bool:
        """Whether a job that others may be held for runs or waits. O(levels)."""
        protected = self.policy.protect.level
        return protected is not None and any(map(self.requests, range(protected + 1)))

    def rank(self, job: Job) -> Rank:
        """A waiting job's place in the order, by its level, predicted seconds and deadlines as they
        are now. One that an operator has raised is the first of its level, under any base
        policy."""
        if job.raised:
            return rank_of("semantic", job.effective_level, FIRST, job.sequence)
        policy = self.policy_ref.policy
        start_by = self.seating.start_by(job) if policy.deadlines.stated else None
        if start_by is not None and not job.overdue:
            return Rank(job.effective_level, start_by, job.sequence)
        seconds = self.estimates.rank_seconds(job) if self.rank_by is None else self.rank_by(job)
        return rank_of(self.policy_ref.policy.base, job.effective_level, seconds, job.sequence)

    def _store_running(self, job: Job) -> None:
        seconds = self.estimates.rank_seconds(job)
        rank = rank_of(self.policy_ref.policy.base, job.effective_level, seconds, job.sequence)
        self.running.add(job, rank, seconds)
        if self.seating.used.table.kv_peak:
            self.seating.kv_peak.add(job)


def _is_fresh(job: Job) -> bool:
    """Whether a job has never had a seat."""
    return job.computed == 0 and not job.preempted.times and job.generated == 0
