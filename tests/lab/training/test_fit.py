"""The training loop: labels, progress reports, and averaging with other weights."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.fit import (
    Options,
    average,
    fit,
    shared_with_neighbors,
    taught_loss,
)
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, WindowTokenizer
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier


def test_average_lies_halfway() -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    middle = (one.weight + other.weight) / 2
    average(one, other.state_dict())
    assert one.weight.allclose(middle)
    average(one, other.state_dict(), 0.2)
    assert one.weight.allclose(0.8 * middle + 0.2 * other.weight)


def test_a_label_shares_with_the_levels_beside_it() -> None:
    shared = shared_with_neighbors(torch.tensor([0, 2, 3]), 4, 0.1)
    wanted = [[0.9, 0.1, 0.0, 0.0], [0.0, 0.05, 0.9, 0.05], [0.0, 0.0, 0.1, 0.9]]
    assert shared.allclose(torch.tensor(wanted))


def tiny(layers: int = 1) -> UrgencyLengthClassifier:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60_000,
        dim=16,
        hidden_dim=32,
        n_layers=layers,
        n_heads=2,
        num_labels=5,
        length_bucket_edges=[10],
        length_bucket_means=[5.0, 40.0],
    )
    return UrgencyLengthClassifier(config)


EXAMPLES = [Example(f"text {number}", number % 5, number + 1) for number in range(40)]


def model(network: UrgencyLengthClassifier) -> Model:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"), pad_token="<pad>"
    )
    return Model(network, WindowTokenizer(tokenizer), SHIPPED_WEIGHTS)


def options(epochs: int, **others) -> Options:
    return Options(Path("unused"), "unused", seed=1, epochs=epochs, **others)


def test_lowest_layers_stay_if_frozen() -> None:
    network = tiny(layers=2)
    before = [layer.ffn.lin1.weight.clone() for layer in network.distilbert.transformer.layer]
    fit(model(network), lambda _: EXAMPLES, options(2), frozen=1)
    after = [layer.ffn.lin1.weight for layer in network.distilbert.transformer.layer]
    assert after[0].equal(before[0])
    assert not after[1].equal(before[1])


def test_every_round_has_a_bar_and_is_reported(capsys) -> None:
    rounds = []
    fit(model(tiny()), lambda _: EXAMPLES, options(2), after_round=lambda: rounds.append(1))
    shown = capsys.readouterr().err
    assert len(rounds) == 2
    assert all(f"round {number}/2: 100%" in shown for number in (1, 2)) and "2/2 [" in shown


def test_answers_of_a_teacher_count_beside_the_labels() -> None:
    teacher, alone, taught = tiny(layers=2), tiny(), tiny()
    fit(model(teacher), lambda _: EXAMPLES, options(1))
    before = teacher.classifier.weight.clone()
    torch.manual_seed(0)
    fit(model(alone), lambda _: EXAMPLES, options(1))
    torch.manual_seed(0)
    fit(model(taught), lambda _: EXAMPLES, options(1), teacher=teacher)
    assert not taught.classifier.weight.equal(alone.classifier.weight)
    assert teacher.classifier.weight.equal(before)


def test_own_answers_teach_nothing() -> None:
    logits = torch.randn(3, 5)
    assert taught_loss(logits, logits + 2).item() == pytest.approx(0, abs=1e-6)
    assert taught_loss(logits, logits.flip(1)) > 0.01
    near, far = torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[9.0, 0.0, 0.0]])
    answer = torch.tensor([[0.0, 0.0, 9.0]])
    assert taught_loss(near, answer) < taught_loss(far, answer)
