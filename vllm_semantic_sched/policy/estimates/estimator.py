"""What is expected of jobs: output length and seconds of work, corrected by what is observed."""

from __future__ import annotations

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd, LengthCalibration
from vllm_semantic_sched.policy.estimates.cost import remaining_seconds
from vllm_semantic_sched.policy.estimates.length import (
    expected_output_tokens,
    expected_without_prediction,
)
from vllm_semantic_sched.policy.estimates.profile_scale import ProfileScale
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile


class Estimator:
    """Estimates from the policy, the engine profile and the predictor's length buckets.

    Attributes:
        scale: the correction of the profile by observed steps, and the profile as given.
    """

    def __init__(self, policy: Policy, profile: EngineProfile) -> None:
        self._policy = policy
        self.scale = ProfileScale(profile)
        self._calibration: LengthCalibration | None = None

    def adopt(self, policy: Policy, profile: EngineProfile) -> None:
        """Switch to a new policy and profile."""
        self._policy = policy
        if profile != self.scale.given:  # else what was learned about the engine stays true
            self.scale = ProfileScale(profile)
        if self._calibration is not None:
            self._calibration.adapt = policy.length.calibrate

    # What is expected

    @property
    def profile(self) -> EngineProfile:
        """What engine work costs, as corrected by the steps observed."""
        return self.scale.profile

    @property
    def buckets(self) -> LengthBuckets | None:
        """What the predictor's length buckets stand for by now; None if it has none. Assign those
        that it was trained with."""
        return self._calibration.buckets if self._calibration else None

    @buckets.setter
    def buckets(self, trained: LengthBuckets | None) -> None:
        adapt = self._policy.length.calibrate
        self._calibration = LengthCalibration(trained, adapt) if trained else None

    @property
    def length_ratio(self) -> float | None:
        """Observed by expected output tokens of recently finished jobs; None if there are none."""
        return self._calibration.ratio if self._calibration else None

    def output_tokens(self, job: Job) -> float:
        """Output tokens expected in all, above what has been generated."""
        length = self._policy.length
        buckets = self.buckets
        # One more token is the least that can come.
        limit = max(job.max_output_tokens, job.generated + 1)
        if job.prediction is None or job.prediction.length is None or buckets is None:
            return min(expected_without_prediction(length.default_tokens, job.generated), limit)
        return expected_output_tokens(
            job.prediction.length, buckets, job.generated, length.estimate, limit
        )

    def tokens(self, job: Job) -> float:
        """Prompt and output tokens expected in all."""
        return job.prompt_tokens + self.output_tokens(job)

    def first_estimate(self, job: Job) -> float | None:
        """Output tokens expected from the prediction alone; None if the job has none."""
        buckets = self.buckets
        if job.prediction is None or job.prediction.length is None or buckets is None:
            return None
        return expected_output_tokens(
            job.prediction.length, buckets, 0, self._policy.length.estimate, job.max_output_tokens
        )

    def remaining(self, job: Job) -> float:
        """Predicted seconds of engine work left; above zero until the job finishes."""
        return remaining_seconds(job, self.output_tokens(job), self.profile)

    def rank_seconds(self, job: Job) -> float:
        """`remaining` in decode steps of the profile as given, so that ranks stored before the
        engine turned out faster or slower stay comparable with those stored after."""
        return self.remaining(job) / self.scale.decode

    # What is observed

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """An engine step with this batch took so many seconds."""
        if self._policy.correct_profile:
            self.scale.observe_step(batch, seconds)

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Copies of KV expected to take `expected` seconds by `profile` took `seconds`."""
        if self._policy.correct_profile:
            self.scale.observe_copies(expected, seconds)

    def learn(self, job: Job, end: AnswerEnd) -> None:
        """A job finished; its `generated` is up to date."""
        predicted = job.prediction.length if job.prediction is not None else None
        if self._calibration is not None and predicted is not None:
            self._calibration.learn(predicted, job.generated, job.max_output_tokens, end)
