"""The model that training starts from: its encoder equals the pretrained one, buckets are even."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from vllm_semantic_sched.lab.training.base import (
    bucket_of,
    distilbert_from_bert,
    length_buckets,
)
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets


def small_bert(layers: int) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def last_states(encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return encoder(ids, attention_mask=mask).last_hidden_state[mask.bool()]


def test_distilbert_of_all_layers_equals_bert():
    bert = small_bert(3)
    network = distilbert_from_bert(bert, range(3)).eval()
    ids = torch.randint(0, 50, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ours = last_states(network.distilbert, ids, mask)
    assert (ours - last_states(bert, ids, mask)).abs().max() < 1e-4


def test_chosen_layers_follow_each_other():
    bert = small_bert(4)
    network = distilbert_from_bert(bert, (0, 2)).eval()
    bert.encoder.layer = torch.nn.ModuleList([bert.encoder.layer[0], bert.encoder.layer[2]])
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.ones_like(ids)
    ours = last_states(network.distilbert, ids, mask)
    assert (ours - last_states(bert, ids, mask)).abs().max() < 1e-4


def test_quantiles_divide_evenly():
    buckets = length_buckets(list(range(1, 101)), 4)
    assert buckets.edges == (26, 51, 76)
    assert buckets.means == (13.0, 38.0, 63.0, 88.0)
    assert [bucket_of(length, buckets.edges) for length in (1, 25, 26, 100, 9999)] == [
        0,
        0,
        1,
        3,
        3,
    ]


@given(st.lists(st.integers(1, 5000), min_size=1), st.integers(2, 12))
def test_buckets_are_ordered_and_never_empty(lengths, count):
    buckets = length_buckets(lengths, count)
    assert len(buckets.means) == len(buckets.edges) + 1 <= count
    assert list(buckets.means) == sorted(set(buckets.means))
    assert {bucket_of(length, buckets.edges) for length in lengths} == set(
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
