"""Bucket lengths that follow the served model."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.estimates.calibration import (
    AnswerEnd,
    LengthCalibration,
    nearest_non_decreasing,
)
from vllm_semantic_sched.policy.estimates.length import expected_output_tokens
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

TRAINED = LengthBuckets(edges=(13, 31, 61, 116, 238), means=(6.5, 20.3, 44.8, 85.0, 165.0, 450.0))
NO_LIMIT = 10**9


def distribution(weights):
    return tuple(weight / sum(weights) for weight in weights)


distributions = st.lists(st.floats(0.001, 1.0), min_size=6, max_size=6).map(distribution)
finished = st.tuples(
    distributions, st.integers(1, 100_000), st.sampled_from([AnswerEnd.STOPPED, AnswerEnd.CUT])
)
histories = st.lists(finished, max_size=60)


def after(history) -> LengthCalibration:
    calibration = LengthCalibration(TRAINED)
    for probabilities, tokens, ending in history:
        calibration.learn(probabilities, tokens, NO_LIMIT, ending)
    return calibration


def expected(calibration, probabilities, estimate="mean") -> float:
    return expected_output_tokens(probabilities, calibration.buckets, 0, estimate)


@given(histories)
def test_means_stay_ordered_and_within_bounds_and_edges_increase(history) -> None:
    means, edges = after(history).buckets.means, after(history).buckets.edges
    assert means[0] >= 1 and list(means) == sorted(means)
    assert means[-1] <= max([TRAINED.means[-1], *(tokens for _, tokens, _ in history)])
    assert edges[0] >= 1 and all(low < high for low, high in itertools.pairwise(edges))


@given(histories, distributions, st.integers(1, 100_000), distributions)
def test_cut_answer_never_lowers_an_estimate(history, seen, tokens, asked) -> None:
    calibration = after(history)
    kinds = ("mean", "median", "p90")
    before = [expected(calibration, asked, kind) for kind in kinds]
    calibration.learn(seen, tokens, tokens, AnswerEnd.CUT)
    for kind, value in zip(kinds, before, strict=True):
        assert expected(calibration, asked, kind) >= value * (1 - 1e-9)


@given(histories, distributions, st.integers(1, 100_000))
def test_answer_moves_the_expectation_toward_its_length(history, seen, tokens) -> None:
    calibration = after(history)
    before = expected(calibration, seen)
    calibration.learn(seen, tokens, NO_LIMIT, AnswerEnd.STOPPED)
    assert abs(expected(calibration, seen) - tokens) <= abs(before - tokens) + 1e-6


@given(histories, distributions, st.integers(1, 100_000))
def test_aborted_requests_change_nothing(history, seen, tokens) -> None:
    calibration = after(history)
    before = calibration.buckets, calibration.ratio
    calibration.learn(seen, tokens, NO_LIMIT, AnswerEnd.ABORTED)
    assert (calibration.buckets, calibration.ratio) == before


def true_lengths(seed: int, factor: float, count: int):
    """Requests of a model with answers `factor` times as long as in the trained buckets:
    (predicted distribution, length)."""
    generator = random.Random(seed)
    for _ in range(count):
        peak = generator.uniform(0, 5)
        probabilities = distribution([0.02 + 0.5 ** abs(bucket - peak) for bucket in range(6)])
        mean = TRAINED.means[generator.choices(range(6), probabilities)[0]]
        yield probabilities, max(1, round(factor * mean * generator.uniform(0.6, 1.4)))


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_expectations_follow_longer_and_shorter_answers(factor, seed) -> None:
    calibration = LengthCalibration(TRAINED)
    for probabilities, tokens in true_lengths(seed, factor, 500):
        calibration.learn(probabilities, tokens, NO_LIMIT, AnswerEnd.STOPPED)
    trained = LengthCalibration(TRAINED)
    asked = [probabilities for probabilities, _ in true_lengths(99, 1.0, 300)]
    errors = [expected(calibration, one) / (factor * expected(trained, one)) - 1 for one in asked]
    assert sorted(map(abs, errors))[270] < 0.15  # nine in ten
    assert calibration.ratio == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("seed", range(3))
def test_expectations_converge_to_lengths_under_a_common_limit(seed) -> None:
    limit = 200
    calibration = LengthCalibration(TRAINED)
    seen = []
    for probabilities, tokens in true_lengths(seed, 3.0, 2000):
        ending = AnswerEnd.STOPPED if tokens < limit else AnswerEnd.CUT
        seen.append((probabilities, min(tokens, limit)))
        calibration.learn(*seen[-1], limit, ending)
    expectations = [min(limit, expected(calibration, p)) for p, _ in seen[-500:]]
    assert sum(expectations) == pytest.approx(sum(tokens for _, tokens in seen[-500:]), rel=0.15)


def test_limits_do_not_lower_longer_expectations() -> None:
    calibration = LengthCalibration(TRAINED)
    for _ in range(500):  # a client that wants one word
        calibration.learn((0.0, 0.0, 0.1, 0.2, 0.3, 0.4), 1, 1, AnswerEnd.CUT)
    assert calibration.buckets == TRAINED
    assert calibration.ratio == pytest.approx(1.0)


def test_edges_keep_their_relative_places_between_means() -> None:
    calibration = LengthCalibration(LengthBuckets(edges=(20, 60), means=(10.0, 40.0, 100.0)))
    for _ in range(3000):
        for bucket, tokens in enumerate((30, 120, 300)):
            one = tuple(float(bucket == other) for other in range(3))
            calibration.learn(one, tokens, NO_LIMIT, AnswerEnd.STOPPED)
    assert calibration.buckets.means == pytest.approx((30, 120, 300), rel=0.01)
    assert calibration.buckets.edges == pytest.approx((60, 180), abs=2)


def test_prediction_with_another_number_of_buckets_raises() -> None:
    with pytest.raises(ValueError):
        LengthCalibration(TRAINED).learn((0.5, 0.5), 10, NO_LIMIT, AnswerEnd.STOPPED)


@given(st.lists(st.floats(-1e6, 1e6), max_size=12))
def test_nearest_non_decreasing_sequence(values) -> None:
    nearest = nearest_non_decreasing(values)
    assert len(nearest) == len(values)
    assert all(low <= high + 1e-6 for low, high in itertools.pairwise(nearest))
    assert sum(nearest) == pytest.approx(sum(values), abs=1e-3)  # a projection keeps the mean
    if values == sorted(values):
        assert nearest == values
