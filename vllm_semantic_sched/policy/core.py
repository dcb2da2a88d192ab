"""The decisions in one place, as the engine and the simulator call them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.batch import Batch
from vllm_semantic_sched.policy.estimates.cost import remaining_seconds
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.estimates.hints import Hint, read_hints
from vllm_semantic_sched.policy.estimates.length import (
    expected_output_tokens,
    expected_without_prediction,
)
from vllm_semantic_sched.policy.estimates.length_calibration import Ending, LengthCalibration
from vllm_semantic_sched.policy.estimates.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.estimates.profile import EngineProfile
from vllm_semantic_sched.policy.estimates.profile_scale import ProfileScale
from vllm_semantic_sched.policy.eviction.retention import (
    HostRoom,
    PreemptionPlan,
    plan_preemption,
)
from vllm_semantic_sched.policy.eviction.rights import EvictionRights
from vllm_semantic_sched.policy.job import Job, JobState, LevelSource
from vllm_semantic_sched.policy.lifecycle import Lifecycle
from vllm_semantic_sched.policy.order.fairness import Fairness
from vllm_semantic_sched.policy.order.rank import Rank, rank_of
from vllm_semantic_sched.policy.order.reservation import EngineCapacity
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.stage import prefill_token_limit, prefills_that_yield
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS
from vllm_semantic_sched.policy.order.waiting import QueueRules, WaitingQueue

# Jobs that get their rank anew per step after the policy has changed: about a millisecond of work,
# so that a queue of 10,000 is in its new order after 100 steps and no step is held up.
_RERANKED_PER_STEP = 100


class SchedulingCore:
    """State of all jobs and the policy's answers about them. Nothing here reads a clock, and
    nothing but `WaitingQueue.ordered` and `RunningSet.by_eviction` looks at more than O(log n)
    jobs.

    Args:
        buckets: length buckets of the predictor; set later if it is still starting.
        clock: seconds, for the times of the lifecycle; decisions do not read it.
    """

    def __init__(
        self,
        policy: Policy,
        profile: EngineProfile,
        buckets: LengthBuckets | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.policy = policy
        self._scale = ProfileScale(profile)
        self._calibration: LengthCalibration | None = None
        self.buckets = buckets
        self.fairness = Fairness(policy, profile, self._make_queue)
        self.waiting = self.fairness.waiting
        self.running = RunningSet(step_seconds=profile.gamma2)
        self.eviction = EvictionRights(policy, self.running, self.fairness, self._rank_seconds)
        self.lifecycle = Lifecycle(clock)
        self._sequence = itertools.count()
        self._outdated: list[Job] = []  # ranked by a policy that is no longer in force

    def check(self, policy: Policy) -> None:
        """Refuse a policy that this engine is too small for.

        Raises:
            PolicyError: naming what does not fit.
        """
        self.fairness.reservation.check([policy.tier(level) for level in range(policy.levels)])

    def adopt(self, policy: Policy, profile: EngineProfile) -> None:
        """Obey another policy from now on. What `policy.live.check_live_change` refuses must not
        differ.

        Every decision uses the new policy at once. The jobs that are queued or running keep their
        frozen keys and get new ones in the coming steps, a bounded number in each, so the heaps
        stay consistent; only the list of them is taken now. Levels that came from a hint stay,
        those that were predicted or are the default one are decided anew.
        """
        self.fairness.adopt(policy, profile)
        self.policy = self.eviction.policy = policy
        if profile != self._scale.given:  # else what was learned about the engine stays true
            self._scale = ProfileScale(profile)
        self.running.step_seconds = profile.gamma2
        if self._calibration is not None:
            self._calibration.adapt = policy.length.calibrate
        # Taken from the end, so running jobs, which hold the seats, come first.
        self._outdated = [*self.waiting, *self.running]

    @property
    def profile(self) -> EngineProfile:
        """What engine work costs, as corrected by the steps observed."""
        return self._scale.profile

    @property
    def profile_scale(self) -> ProfileScale:
        """The correction, and the profile as given."""
        return self._scale

    @property
    def outdated(self) -> int:
        """Jobs that may still be ranked by the policy before."""
        return len(self._outdated)

    @property
    def buckets(self) -> LengthBuckets | None:
        """What the predictor's length buckets stand for by now; None if it has none. Those
        that are assigned are the ones that it was trained with."""
        return self._calibration.buckets if self._calibration else None

    @buckets.setter
    def buckets(self, trained: LengthBuckets | None) -> None:
        adapt = self.policy.length.calibrate
        self._calibration = LengthCalibration(trained, adapt) if trained else None

    @property
    def length_ratio(self) -> float | None:
        """Observed by expected output tokens of recently finished jobs; None if there are none."""
        return self._calibration.ratio if self._calibration else None

    def set_capacity(self, capacity: EngineCapacity, tokens_per_step: int = 1) -> None:
        """See `policy.order.fairness.Fairness.set_capacity`."""
        self.fairness.set_capacity(capacity, tokens_per_step)

    def new_queue(self) -> WaitingQueue:
        """A waiting queue in the order of ranks alone: no tenants, nobody held back."""
        return self._make_queue(QueueRules(by_level=self.policy.uses_urgency))

    def read_hints(self, extra_args: Any, priority: Any) -> Hint:
        """See `policy.estimates.hints.read_hints`."""
        return read_hints(extra_args, priority, self.policy.hints, self.policy.levels)

    def new_job(
        self,
        request_id: str,
        arrival: float,
        prompt_tokens: int,
        max_output_tokens: int,
        hint: Hint,
        awaits_prediction: bool,
        tenant: str = ANONYMOUS,
    ) -> Job:
        """A job for a request that has just arrived; it is in no queue yet."""
        level = self.policy.default_level if hint.level is None else hint.level
        job = Job(
            request_id=request_id,
            sequence=next(self._sequence),
            arrival=arrival,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            level=level,
            level_source=hint.source,
            awaits_prediction=awaits_prediction,
            tenant=tenant,
        )
        if hint.level is not None or not awaits_prediction:
            self._cap_level(job)
        self.lifecycle.arrive(job)
        return job

    # Queueing

    def enqueue(self, job: Job, queue: WaitingQueue) -> None:
        """Queue a job: into the unsorted buffer while its level is open, else by rank.

        A job that comes back (skipped, preempted) has waited before and is ranked with what is
        known by now, so the buffer stays in arrival order.
        """
        if job.state is JobState.RUNNING:  # a session that gave up its seat to wait for input
            self.running.discard(job)
            self.fairness.leave(job)
            self.lifecycle.move(job, JobState.WAITING, "input")
        fresh = job.computed == 0 and job.preemptions == 0 and job.generated == 0
        if job.awaits_prediction and job.level_source is LevelSource.DEFAULT and fresh:
            queue.buffer(job)
        else:
            queue.push(job, self.rank(job))
        if queue is self.waiting:
            self.fairness.wait(job)

    def requeue(self, job: Job, queue: WaitingQueue) -> None:
        """Queue a job that was taken and could not be admitted in this step, or was preempted."""
        queue.push(job, self.rank(job))
        if queue is self.waiting:
            self.fairness.wait(job)

    def take(self, job: Job, queue: WaitingQueue) -> None:
        """The engine takes what `queue.peek` returned, to give it a seat. It starts, or is
        queued again in the same step."""
        if queue is self.waiting:
            self.fairness.take(job)
        else:
            queue.remove(job)

    def predicted(self, job: Job, prediction: Prediction | None) -> None:
        """A prediction has come back, or is known not to come (None). Moves the job, wherever it
        is, to its new rank. Hints keep the last word on the level."""
        job.awaits_prediction = False
        job.prediction = prediction
        if prediction is not None and job.level_source is LevelSource.DEFAULT:
            job.level_source = LevelSource.PREDICTION
            self._decide_level(job)
            self._cap_level(job)
            self.fairness.relevel(job)
        if job in self.waiting:
            self.waiting.push(job, self.rank(job))
        elif job in self.running:
            self._store_running(job)

    # Running

    def start(self, job: Job) -> None:
        """A job got its seat; its `computed` is up to date."""
        self.fairness.start(job)
        job.swapped = 0
        self.lifecycle.move(job, JobState.RUNNING)
        self._store_running(job)

    def plan_preemption(
        self, job: Job, host: HostRoom | None = None, can_drop: bool = False
    ) -> PreemptionPlan:
        """What preempting a running job would do and cost.

        Args:
            host: what the host can take of its KV; None where it can take none.
            can_drop: whether the caller can end requests; the job's tier has to allow it too.
        """
        may_drop = can_drop and self.policy.tier(job.level).drop
        return plan_preemption(job, self.profile, self.policy.retention, host, may_drop)

    def preempt(self, job: Job, plan: PreemptionPlan, reason: str = "") -> bool:
        """Take a running job's seat; the caller queues it again, or ends it if that is the plan.

        Args:
            reason: for the record (`policy.lifecycle.Transition`).

        Returns:
            Whether it has got few new tokens since it lost its seat last.
        """
        thrashed = (
            job.preemptions > 0
            and job.generated - job.generated_before < self.policy.retention.thrash_tokens
        )
        self.running.discard(job)
        self.fairness.leave(job)
        job.preemptions += 1
        job.preemption_seconds += plan.seconds
        job.generated_before = job.generated
        job.computed = plan.on_device
        job.swapped = plan.saved
        state = JobState.SWAPPED if plan.saved else JobState.WAITING
        self.lifecycle.move(job, state, reason, plan.kind.value)
        return thrashed

    def lose_copy(self, job: Job) -> None:
        """The KV that a waiting job had on the host is gone."""
        if job.state is not JobState.SWAPPED:
            return
        self.lifecycle.move(job, JobState.WAITING, "copy_lost")
        job.computed = job.swapped = 0
        if job in self.waiting:
            self.waiting.push(job, self.rank(job))

    def first_token(self, job: Job) -> None:
        """A running job's first token is there: what a near deadline gained it is spent."""
        self.lifecycle.first_token(job)
        if job.hurried:
            job.hurried = 0.0
            if job in self.running:
                self._store_running(job)

    def finish(
        self,
        job: Job,
        ending: Ending,
        state: JobState = JobState.COMPLETED,
        reason: str = "",
    ) -> None:
        """A job ended; its `generated` is up to date, and later estimates learn from it.

        Args:
            state: the end that it came to.
            reason: for the record (`policy.lifecycle.Transition`).
        """
        self.waiting.remove(job)
        self.running.discard(job)
        self.fairness.leave(job)
        self.lifecycle.move(job, state, reason)
        predicted = job.prediction.length if job.prediction is not None else None
        if self._calibration is not None and predicted is not None:
            self._calibration.learn(predicted, job.generated, job.max_output_tokens, ending)

    def step(self, observe: Callable[[Job], None], now: float) -> list[Job]:
        """One engine step has passed and the next begins.

        Args:
            observe: updates a job's `generated` and `computed`.
            now: seconds, on the clock of `Job.arrival`.

        Returns:
            Running jobs whose order changed, as they outlived their estimate and got a new one or
            as a new policy ranks them otherwise; waiting jobs that it puts at another level.
        """
        running, waiting = self._rerank_some()
        running = [*self.running.advance(), *running]
        for job in running:
            observe(job)
            self._store_running(job)
        for job in self.fairness.step(now, observe):
            self.waiting.push(job, self.rank(job))
        return [*running, *waiting]

    def uneventful_steps(self) -> int:
        """Coming steps in which `step` does nothing, if nobody comes, goes or is predicted until
        then; 0 where that takes more than counting them."""
        if self._outdated or not self.fairness.timeless:
            return 0
        return self.running.steps_to_overdue

    def skip_steps(self, steps: int) -> None:
        """So many engine steps have passed, `uneventful_steps` at most."""
        self.running.skip(steps)

    def _rerank_some(self) -> tuple[list[Job], list[Job]]:
        """Carry on with what `adopt` began: running jobs, which are not stored yet, and waiting
        ones that got another level."""
        running, waiting = [], []
        for _ in range(min(len(self._outdated), _RERANKED_PER_STEP)):
            job = self._outdated.pop()
            level = job.level
            self._decide_level(job)
            self.fairness.relevel(job)
            if job in self.waiting:
                self.waiting.rerank(job, self.rank(job))
                if job.level != level:
                    waiting.append(job)
            elif job in self.running:
                running.append(job)
        return running, waiting

    def _decide_level(self, job: Job) -> None:
        if job.level_source is LevelSource.DEFAULT:
            job.level = max(self.policy.default_level, job.best_level)
        elif job.level_source is LevelSource.PREDICTION and job.prediction is not None:
            level = decide_level(job.prediction.urgency, self.policy.decision)
            job.level = max(min(level, self.policy.levels - 1), job.best_level)
        self.lifecycle.recount(job)

    def _cap_level(self, job: Job) -> None:
        """Count a job whose level has been decided against its tenant's part of the top levels."""
        lowest = self.policy.levels - 1
        allowed = self.fairness.top_levels.level(job.tenant, job.level, lowest, job.arrival)
        if allowed != job.level:
            job.level = job.best_level = allowed
            self.lifecycle.recount(job)

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """An engine step with this in it took so long; estimates follow (`ProfileScale`)."""
        if self.policy.correct_profile:
            self._scale.observe_step(batch, seconds)

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Copies of KV that should have taken `expected` seconds by `profile` took so long."""
        if self.policy.correct_profile:
            self._scale.observe_copies(expected, seconds)

    # Decisions

    def prefill_token_limit(
        self, decoding_level: float | None, prefill_level: float | None
    ) -> int | None:
        """See `policy.order.stage.prefill_token_limit`."""
        if not self.policy.uses_urgency:
            return None
        return prefill_token_limit(decoding_level, prefill_level, self.policy.stage, self.profile)

    def prefills_that_yield(
        self, newcomer: Job, prefilling: Iterable[Job], token_budget: int
    ) -> list[Job]:
        """See `policy.order.stage.prefills_that_yield`."""
        if not self.policy.uses_urgency:
            return []
        return prefills_that_yield(newcomer, prefilling, token_budget)

    # Ranks

    def rank(self, job: Job) -> Rank:
        """Where a job stands by what is known of it now."""
        seconds = self._rank_seconds(job)
        return rank_of(self.policy.base, job.effective_level, seconds, job.sequence)

    def remaining(self, job: Job) -> float:
        """Predicted seconds of engine work left; above zero until the job finishes."""
        return remaining_seconds(job, self.expected_output(job), self.profile)

    def expected_output(self, job: Job) -> float:
        """Output tokens expected in all, above what has been generated."""
        length = self.policy.length
        buckets = self.buckets
        # One more token is the least that can come.
        limit = max(job.max_output_tokens, job.generated + 1)
        if job.prediction is None or job.prediction.length is None or buckets is None:
            return min(expected_without_prediction(length.default_tokens, job.generated), limit)
        return expected_output_tokens(
            job.prediction.length, buckets, job.generated, length.estimate, limit
        )

    def first_estimate(self, job: Job) -> float | None:
        """Output tokens that its prediction alone makes of a job; None if it has none."""
        buckets = self.buckets
        if job.prediction is None or job.prediction.length is None or buckets is None:
            return None
        return expected_output_tokens(
            job.prediction.length, buckets, 0, self.policy.length.estimate, job.max_output_tokens
        )

    def _make_queue(self, rules: QueueRules) -> WaitingQueue:
        return WaitingQueue(self._default_rank, rules)

    def _store_running(self, job: Job) -> None:
        seconds = self._rank_seconds(job)
        rank = rank_of(self.policy.base, job.effective_level, seconds, job.sequence)
        self.running.add(job, rank, seconds)

    def _rank_seconds(self, job: Job) -> float:
        # In decode steps of the profile as given: ranks that were stored before the engine turned
        # out faster or slower stay comparable with those stored after.
        return self.remaining(job) / self._scale.decode

    def _default_rank(self, job: Job) -> Rank:
        # Not job.level: buffered jobs are at the default level, and a change of the policy must not
        # leave two kinds of them in the buffer.
        return rank_of(self.policy.base, self.policy.default_level, float("inf"), job.sequence)
