"""From bucket probabilities to a number of tokens, and on to the next bucket."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.length import expected_output_tokens, expected_without_prediction
from vllm_semantic_sched.policy.prediction import LengthBuckets

BUCKETS = LengthBuckets(edges=(10, 50, 200), means=(5.0, 30.0, 120.0, 400.0))
weights = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda w: sum(w) > 0)
estimates = st.sampled_from(["mean", "median"])


@given(weights, st.integers(0, 5000), estimates)
def test_a_running_request_never_looks_finished(weights, generated, estimate) -> None:
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    assert expected_output_tokens(probabilities, BUCKETS, generated, estimate) > generated


@given(st.integers(1, 1000), st.integers(0, 5000))
def test_nor_does_one_without_a_prediction(default, generated) -> None:
    assert expected_without_prediction(default, generated) > generated


def test_outlived_buckets_drop_out() -> None:
    probabilities = (0.9, 0.0, 0.1, 0.0)
    assert expected_output_tokens(probabilities, BUCKETS, 0, "mean") == 0.9 * 5 + 0.1 * 120
    assert expected_output_tokens(probabilities, BUCKETS, 0, "median") == 5
    # past the first bucket's edge only the third is left
    assert expected_output_tokens(probabilities, BUCKETS, 20, "mean") == 120
    # past everything predicted: the next bucket in line, then half as much again
    assert 200 < expected_output_tokens(probabilities, BUCKETS, 250, "mean") == 400
    assert expected_output_tokens(probabilities, BUCKETS, 1000, "mean") == 1500
