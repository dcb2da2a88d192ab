"""Expected output length from bucket probabilities and generated tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.estimates.length import (
    expected_output_tokens,
    expected_without_prediction,
)
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

BUCKETS = LengthBuckets(edges=(10, 50, 200), means=(5.0, 30.0, 120.0, 400.0))
weights = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda w: sum(w) > 0)
estimates = st.sampled_from(["mean", "median", "p90"])


@given(weights, st.integers(0, 5000), estimates)
def test_estimate_stays_above_the_generated_tokens(weights, generated, estimate) -> None:
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    assert expected_output_tokens(probabilities, BUCKETS, generated, estimate) > generated


@given(weights, st.integers(0, 20))
def test_estimate_stays_above_them_with_equal_bucket_means(weights, generated) -> None:
    crowded = LengthBuckets(edges=(6, 7, 8), means=(5.0, 5.0, 5.0, 5.0))
    probabilities = [weight / sum(weights) for weight in weights]
    assert expected_output_tokens(probabilities, crowded, generated, "mean") > generated


@given(st.integers(0, 5000))
def test_estimate_stays_above_them_without_a_prediction(generated) -> None:
    assert expected_without_prediction(generated) > generated


def test_outlived_buckets_drop_out() -> None:
    probabilities = (0.9, 0.0, 0.1, 0.0)
    assert expected_output_tokens(probabilities, BUCKETS, 0, "mean") == 0.9 * 5 + 0.1 * 120
    # past the first bucket's edge only the third is left
    assert expected_output_tokens(probabilities, BUCKETS, 20, "mean") == 120
    # beyond all predicted lengths: the next bucket, then half as many tokens again
    assert 200 < expected_output_tokens(probabilities, BUCKETS, 250, "mean") == 400
    assert expected_output_tokens(probabilities, BUCKETS, 1000, "mean") == 1500


def test_limit_applies_to_each_bucket() -> None:
    def expected(probabilities, kind="mean"):
        return expected_output_tokens(probabilities, BUCKETS, 0, kind, limit=100)

    assert expected((0.5, 0.0, 0.0, 0.5)) == 0.5 * 5 + 0.5 * 100
    # Both would be cut to 100 if the means were, and look alike.
    assert expected((0.3, 0.0, 0.0, 0.7)) < expected((0.1, 0.0, 0.0, 0.9)) < 100
    assert expected((0.0, 0.0, 0.0, 1.0), "p90") == 100


@given(weights, st.integers(0, 5000), estimates, st.integers(1, 500))
def test_estimate_lies_between_generated_tokens_and_limit(
    weights, generated, estimate, room
) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    limit = generated + room
    found = expected_output_tokens(probabilities, BUCKETS, generated, estimate, limit)
    assert generated < found <= limit + 1e-9 * limit


def test_quantiles_match_the_predicted_distribution() -> None:
    def estimate(probabilities, kind, generated=0):
        return expected_output_tokens(probabilities, BUCKETS, generated, kind)

    even = (0.25, 0.25, 0.25, 0.25)
    assert estimate(even, "median") == 50  # the edge that half of it lies below
    # six tenths into the last bucket, which reaches to twice its mean
    assert estimate(even, "p90") == pytest.approx(200 + 0.6 * 600)
    assert estimate((1.0, 0.0, 0.0, 0.0), "p90") == pytest.approx(9)
    # what has been generated counts no more: half of 30..50, not of 10..50
    assert estimate((0.0, 1.0, 0.0, 0.0), "median", generated=30) == 40


@given(weights, st.integers(0, 5000))
def test_median_never_exceeds_p90(weights, generated) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    median, p90 = (
        expected_output_tokens(probabilities, BUCKETS, generated, estimate)
        for estimate in ("median", "p90")
    )
    assert median <= p90


def test_bounds_apply_to_each_bucket() -> None:
    def expected(probabilities, generated=0, kind="mean", limit=300, shortest=0):
        return expected_output_tokens(probabilities, BUCKETS, generated, kind, limit, shortest)

    even = (0.25, 0.25, 0.25, 0.25)
    assert expected(even, shortest=100) == (100 + 100 + 120 + 300) / 4
    # What it wrote while it could not end tells nothing about its own length.
    assert expected(even, generated=60, shortest=100) == (100 + 100 + 120 + 300) / 4
    assert expected(even, generated=100, shortest=100) == (120 + 300) / 2
    assert expected((1.0, 0.0, 0.0, 0.0), kind="p90", shortest=100) == 100


@given(weights, estimates, st.integers(1, 2000), st.integers(0, 1999))
def test_equal_bounds_make_the_length_exact(weights, estimate, length, generated) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    found = expected_output_tokens(
        probabilities, BUCKETS, min(generated, length - 1), estimate, length, length
    )
    assert found == length


@given(weights, st.integers(0, 500), estimates, st.integers(1, 300), st.integers(0, 300))
def test_estimate_keeps_both_bounds(weights, generated, estimate, room, shortest) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    limit = generated + room
    found = expected_output_tokens(
        probabilities, BUCKETS, generated, estimate, limit, min(shortest, limit)
    )
    assert max(generated, min(shortest, limit) - 1e-6) < found <= limit + 1e-9 * limit
