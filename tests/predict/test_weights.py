"""The stored form: int8 and back, and a whole network through a folder."""

import json

import pytest
import torch
from transformers import DistilBertConfig

from vllm_semantic_sched.lab.training.stored import quantized, save_network
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, TextPredictor
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.weights import dequantized, load_network


@pytest.fixture
def tiny_network():
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60_000,
        dim=16,
        hidden_dim=32,
        n_layers=1,
        n_heads=2,
        num_labels=5,
        length_bucket_edges=[10, 20],
        length_bucket_means=[5.0, 15.0, 40.0],
    )
    return UrgencyLengthClassifier(config).eval()


def test_int8_is_off_by_half_a_step_at_most():
    torch.manual_seed(0)
    matrix = torch.randn(7, 33) * torch.tensor([[10.0**-row] for row in range(7)])
    matrix[3] = 0.0
    state = {"layer.weight": matrix, "layer.bias": torch.randn(7)}
    stored = quantized(state)
    assert stored["layer.weight"].dtype == torch.int8
    restored = dequantized(stored)
    assert restored.keys() == state.keys()
    assert torch.equal(restored["layer.bias"], state["layer.bias"])
    half_step = matrix.abs().amax(1, keepdim=True) / 127 / 2
    assert ((restored["layer.weight"] - matrix).abs() <= half_step * 1.001).all()


def test_what_fine_tuning_changed_is_stored(tiny_network, tmp_path):
    save_network(tiny_network, SHIPPED_WEIGHTS, tmp_path)
    loaded = load_network(tmp_path)
    weight = loaded.pre_classifier.weight
    with torch.no_grad():
        weight += weight.abs().amax() / 1000  # a quarter of a step of int8 at most
    save_network(loaded, SHIPPED_WEIGHTS, tmp_path, "fp16")
    assert torch.allclose(load_network(tmp_path).pre_classifier.weight, weight, rtol=1e-3)


def test_a_network_survives_its_folder(tiny_network, tmp_path):
    save_network(tiny_network, SHIPPED_WEIGHTS, tmp_path)
    loaded = load_network(tmp_path)
    ids = torch.tensor([[101, 2000, 3000, 102]])
    with torch.inference_mode():
        before = tiny_network(ids, torch.ones_like(ids))
        after = loaded(ids, torch.ones_like(ids))
    for old, new in zip(before, after, strict=True):
        assert torch.allclose(old, new, atol=0.02)


def test_calibration_survives_its_folder(tiny_network, tmp_path):
    tiny_network.config.temperature = tiny_network.config.length_temperature = 1.3
    save_network(tiny_network, SHIPPED_WEIGHTS, tmp_path)
    save_network(load_network(tmp_path), tmp_path, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert (settings["temperature"], settings["length_temperature"]) == (1.3, 1.3)


def test_urgency_head_weighs_tokens_by_itself(tiny_network, tmp_path):
    ids = torch.tensor([[0, 9, 8, 2], [0, 7, 2, 1]])
    mask = (ids != 1).long()
    with torch.inference_mode():
        mean = tiny_network(ids, mask)
        tiny_network.add_attention()
        for new, old in zip(tiny_network(ids, mask), mean, strict=True):
            assert torch.allclose(new, old, atol=1e-6)  # all the same at first
        tiny_network.token_weight.weight += torch.randn(1, 16)
        tiny_network.add_attention()  # keeps what is there
        urgency, length = tiny_network(ids, mask)
        assert (urgency - mean[0]).abs().max() > 1e-5
        assert torch.equal(length, mean[1])
        save_network(tiny_network, SHIPPED_WEIGHTS, tmp_path, "fp16")
        again, _ = load_network(tmp_path)(ids, mask)
        padded = torch.nn.functional.pad(ids, (0, 3), value=1)
        longer, _ = tiny_network(padded, (padded != 1).long())
    assert torch.allclose(urgency, again, atol=1e-4)
    assert torch.allclose(urgency, longer, atol=1e-6)


def test_a_stored_folder_can_be_configured_as_model(tiny_network, tmp_path):
    save_network(tiny_network, SHIPPED_WEIGHTS, tmp_path / "model")
    predictor = TextPredictor.load(str(tmp_path / "model"))
    assert predictor.length_buckets.edges == (10, 20)
    (prediction,) = predictor.predict(["hello"])
    assert len(prediction.urgency) == 5 and len(prediction.length) == 3


def test_padding_does_not_change_a_prediction(tiny_network):
    ids = torch.tensor([[101, 2000, 102, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with torch.inference_mode():
        padded = tiny_network(ids, mask)[0]
        alone = tiny_network(ids[:, :3], mask[:, :3])[0]
    assert torch.allclose(padded, alone, atol=1e-5)
