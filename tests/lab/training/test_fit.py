"""The training loop: labels, progress reports, and averaging with other weights."""

import torch
from torch import nn
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.training.fit import average, fit, shared_with_neighbors
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer


def test_average_lies_halfway() -> None:
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    middle = (one.weight + other.weight) / 2
    average(one, other.state_dict())
    assert one.weight.allclose(middle)


def test_a_label_shares_with_the_levels_beside_it() -> None:
    shared = shared_with_neighbors(torch.tensor([0, 2, 3]), 4, 0.1)
    wanted = [[0.9, 0.1, 0.0, 0.0], [0.0, 0.05, 0.9, 0.05], [0.0, 0.0, 0.1, 0.9]]
    assert shared.allclose(torch.tensor(wanted))


def test_every_step_is_reported() -> None:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60_000,
        dim=16,
        hidden_dim=32,
        n_layers=1,
        n_heads=2,
        num_labels=5,
        length_bucket_edges=[10],
        length_bucket_means=[5.0, 40.0],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(SHIPPED_WEIGHTS / "tokenizer.json"), pad_token="<pad>"
    )
    examples = [Example(f"text {number}", number % 5, number + 1) for number in range(40)]
    steps, rounds = [], []
    fit(
        UrgencyLengthClassifier(config),
        WindowTokenizer(tokenizer),
        lambda _: examples,
        seed=1,
        epochs=2,
        after_round=lambda: rounds.append(len(steps)),
        on_step=steps.append,
    )
    assert [(one.round, one.number) for one in steps] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all((one.rounds, one.steps) == (2, 2) and one.loss > 0 for one in steps)
    assert rounds == [2, 4]
