"""Estimates of output length and seconds of work, corrected by measurements."""

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd, LengthCalibration
from vllm_semantic_sched.policy.estimates.length import (
    Estimate,
    expected_output_tokens,
    expected_without_prediction,
)
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.policy.profile.correction import ProfileScale
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile


class Estimator:
    """Estimates from the policy, the engine profile and the predictor's length buckets."""

    def __init__(self, ref: PolicyRef, profile: EngineProfile) -> None:
        self._ref = ref
        self.scale = ProfileScale(profile)
        self._calibration: LengthCalibration | None = None

    def use_profile(self, profile: EngineProfile) -> None:
        """Estimate by another given profile. The correction measured for an equal one stays."""
        if profile != self.scale.given:
            self.scale = ProfileScale(profile)

    @property
    def profile(self) -> EngineProfile:
        """The engine profile, corrected by measured steps."""
        return self.scale.profile

    @property
    def buckets(self) -> LengthBuckets | None:
        """The predictor's length buckets, calibrated; None without any. Assign the trained ones."""
        return self._calibration.buckets if self._calibration else None

    @buckets.setter
    def buckets(self, trained: LengthBuckets | None) -> None:
        """Calibrate other buckets from now on."""
        self._calibration = None if trained is None else LengthCalibration(trained)

    @property
    def length_ratio(self) -> float | None:
        """Observed / expected output tokens of recently finished jobs; None without any."""
        return self._calibration.ratio if self._calibration else None

    def output_tokens(self, job: Job, share: float | None = None) -> float:
        """Total output tokens, above those generated so far: expected, or what a `share` of such
        answers does not exceed."""
        generated = job.generated
        # At least one more token will come.
        limit = max(job.max_output_tokens, generated + 1)
        shortest = min(job.stated.shortest, limit)
        predicted = job.prediction.length if job.prediction else None
        buckets = self.buckets
        if predicted is None or buckets is None:
            expected = expected_without_prediction(generated)
            return min(max(expected, shortest), limit)
        estimate: Estimate | float = "mean" if share is None else share
        return expected_output_tokens(
            predicted,
            buckets,
            generated=generated,
            estimate=estimate,
            limit=limit,
            shortest=shortest,
        )

    def tokens(self, job: Job, share: float | None = None) -> float:
        """Prompt tokens plus `output_tokens`."""
        return job.prompt_tokens + self.output_tokens(job, share)

    def first_estimate(self, job: Job) -> float | None:
        """Output tokens predicted at first; None without, or if the job states its length."""
        buckets = self.buckets
        predicted = job.prediction.length if job.prediction else None
        is_stated = job.stated.shortest or job.stated.longest is not None
        if predicted is None or buckets is None or is_stated:
            return None
        return expected_output_tokens(
            predicted,
            buckets,
            generated=0,
            estimate="mean",
            limit=job.max_output_tokens,
        )

    def remaining(self, job: Job) -> float:
        """Predicted seconds of engine work left; above zero until the job finishes."""
        return remaining_seconds(job, self.output_tokens(job), self.profile)

    def answer_seconds(self, job: Job, step: float, share: float | None = None) -> float:
        """Time from a job's next seat to its last token, where the steps of the engine take `step`
        seconds: expected, or within which a `share` of such answers end."""
        output, profile = self.output_tokens(job, share), self.profile
        # A step beside others takes longer than that of a sequence alone, which decodes count.
        beside = max(0.0, step - profile.gamma2) * (output - job.generated)
        return remaining_seconds(job, output, profile) + beside

    def rank_seconds(self, job: Job) -> float:
        """`remaining` on the scale of the uncorrected profile, so that ranks stored before and
        after a correction stay comparable."""
        return self.remaining(job) / self.scale.decode

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn from the measured duration of an engine step."""
        if self._ref.policy.correct_profile:
            self.scale.observe_step(batch, seconds)

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Learn from copies of KV that took `seconds`, with `expected` seconds by `profile`."""
        if self._ref.policy.correct_profile:
            self.scale.observe_copies(expected, seconds)

    def learn(self, job: Job, end: AnswerEnd) -> None:
        """Learn from a finished job whose `generated` is up to date, unless the request bounded
        its length: such an answer does not show what the model would have written."""
        predicted = job.prediction.length if job.prediction else None
        if self._calibration is None or predicted is None:
            return
        if job.generated > job.stated.shortest and job.stated.longest is None:
            self._calibration.learn(predicted, job.generated, job.max_output_tokens, end)


def remaining_seconds(job: Job, expected_output: float, profile: EngineProfile) -> float:
    """Engine time that a job still needs: load, prefill of tokens without KV, decode, to
    `expected_output` tokens (more than `job.generated`)."""
    tokens = job.tokens
    in_place = job.computed + job.swapped
    if job.cached > in_place:
        in_place = job.cached
    # The newest token of a decoding job has no KV yet; decoding it is not a prefill.
    prefill = profile.prefill(in_place, tokens) if tokens - in_place > 1 else 0.0
    decode = profile.decode(tokens, expected_output - job.generated)
    return profile.load(job.swapped) + prefill + decode if job.swapped else prefill + decode
