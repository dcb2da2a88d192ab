"""Length buckets: even, ordered and never empty."""

from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import DistilBertConfig

from vllm_semantic_sched.lab.training.base import Model, length_buckets
from vllm_semantic_sched.lab.training.stored import save_network
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.predict import SECOND, SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier


def test_quantiles_divide_evenly():
    buckets = length_buckets(list(range(1, 101)), 4)
    assert buckets.edges == (26, 51, 76)
    assert buckets.means == (13.0, 38.0, 63.0, 88.0)


@given(st.lists(st.integers(1, 5000), min_size=1), st.integers(2, 12))
def test_buckets_are_ordered_and_never_empty(lengths, count):
    buckets = length_buckets(lengths, count)
    assert len(buckets.means) == len(buckets.edges) + 1 <= count
    assert list(buckets.means) == sorted(set(buckets.means))
    assert {bisect_right(buckets.edges, length) for length in lengths} == set(
        range(len(buckets.means))
    )


def test_no_lengths_raises():
    with pytest.raises(ValueError, match="no lengths"):
        length_buckets([], 3)


def test_mismatched_buckets_are_refused():
    with pytest.raises(ValueError, match="2 buckets"):
        LengthBuckets((10,), (4.0,))
    with pytest.raises(ValueError, match="increase"):
        LengthBuckets((10, 10), (4.0, 5.0, 6.0))


def test_second_network_stays_while_levels_stay(tmp_path):
    shape = {"vocab_size": 10, "dim": 8, "hidden_dim": 8, "n_heads": 2, "n_layers": 1}
    buckets = {"length_bucket_edges": [10], "length_bucket_means": [5.0, 40.0]}
    network = UrgencyLengthClassifier(DistilBertConfig(**shape, **buckets, num_labels=5))
    save_network(network, None, tmp_path / SECOND)
    stored = sorted(path.name for path in (tmp_path / SECOND).iterdir())
    save_network(network, SHIPPED_WEIGHTS, tmp_path)
    model, output = Model(network, None, tmp_path), tmp_path / "output"
    model.save(output, keeps_levels=True)
    assert sorted(path.name for path in (output / SECOND).iterdir()) == stored
    model.save(tmp_path, keeps_levels=True)  # in place
    assert sorted(path.name for path in (tmp_path / SECOND).iterdir()) == stored
    model.save(output)
    assert not (output / SECOND).exists()
