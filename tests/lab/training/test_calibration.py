"""The end of training: temperatures, and the average with the weights before."""

import pytest
import torch
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.calibration import (
    average_for,
    best_temperature,
)
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, WindowTokenizer
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier


def test_temperature_gives_back_the_noise_that_labels_have():
    torch.manual_seed(0)
    honest = 2 * torch.randn(4000, 5)
    labels = torch.multinomial(torch.softmax(honest, dim=1), 1)[:, 0]
    assert best_temperature(honest, labels) == pytest.approx(1, abs=0.1)
    assert best_temperature(3 * honest, labels) == pytest.approx(3, abs=0.3)


def test_weights_are_averaged_in_the_proportion_that_reads_best() -> None:
    """Networks that give each text one level: 2 the trained one, 0 the one before."""
    shape = {"vocab_size": 60_000, "dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2}
    buckets = {"length_bucket_edges": [], "length_bucket_means": [1.0]}
    network = UrgencyLengthClassifier(DistilBertConfig(**shape, **buckets, num_labels=3))
    for weights in network.parameters():
        weights.data.zero_()
    trained, old = torch.tensor([0.0, 0.0, 4.0]), torch.tensor([4.0, 0.0, 0.0])
    before = {**network.state_dict(), "classifier.bias": old}
    pieces = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"))
    model = Model(network, WindowTokenizer(pieces), SHIPPED_WEIGHTS)
    for level, share in ((2, 0.0), (0, 0.5)):
        network.classifier.bias.data.copy_(trained)
        examples = [Example("a text", level), Example("no level", None, 7)]
        assert average_for(model, before, examples) == share
        assert network.classifier.bias.allclose((1 - share) * trained + share * old)
