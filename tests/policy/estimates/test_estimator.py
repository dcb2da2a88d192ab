"""Estimates of jobs: stated lengths, and what estimates learn."""

import pytest
from jobs import make_job, policy_ref

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.job import FREE_LENGTH, StatedLength
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile

BUCKETS = LengthBuckets(edges=(50,), means=(20.0, 100.0))
LONG = Prediction((1.0,), (0.0, 1.0))


def estimator() -> Estimator:
    made = Estimator(policy_ref(), load_profile("default"))
    made.buckets = BUCKETS
    return made


def test_a_stated_length_counts_with_and_without_a_prediction() -> None:
    estimates = estimator()
    for prediction in (None, LONG):
        exact = make_job(
            prediction=prediction, max_output_tokens=30, stated=StatedLength(30, 30), generated=5
        )
        drawn_out = make_job(prediction=prediction, stated=StatedLength(600))
        assert estimates.output_tokens(exact) == 30
        assert estimates.output_tokens(drawn_out) == 600
    assert estimates.remaining(exact) < estimates.remaining(drawn_out)


@pytest.mark.parametrize(
    ("stated", "learns"),
    [
        (FREE_LENGTH, True),
        (StatedLength(10), True),
        (StatedLength(30), False),  # ended as soon as it could
        (StatedLength(30, 30), False),
        (StatedLength(0, 40), False),
    ],
)
def test_calibration_ignores_answers_whose_length_was_forced(stated, learns) -> None:
    estimates = estimator()
    job = make_job(prediction=LONG, generated=30, stated=stated)
    estimates.learn(job, AnswerEnd.STOPPED)
    assert (estimates.length_ratio is not None) == learns
    assert (estimates.buckets != BUCKETS) == learns


def test_first_estimate_is_that_of_the_prediction_alone() -> None:
    estimates = estimator()
    assert estimates.first_estimate(make_job(prediction=LONG)) == 100
    assert estimates.first_estimate(make_job(prediction=LONG, stated=StatedLength(3))) is None


def test_the_form_of_an_answer_lowers_its_limit() -> None:
    core = SchedulingCore(parse_policy({}), load_profile("default"))
    job = core.arrive(
        core.draft("choice", 10, 500, core.read_hints(None, 0), False, stated=StatedLength(0, 6)),
        0.0,
    )
    assert job.max_output_tokens == 6
    assert core.estimates.output_tokens(job) == 6
