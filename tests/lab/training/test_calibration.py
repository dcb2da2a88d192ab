"""The end of training: thresholds that agree best with given levels."""

import random

import pytest
import torch
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.evaluation.metrics import quadratic_weighted_kappa
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.calibration import (
    average_for,
    best_temperature,
    fitted_thresholds,
)
from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, WindowTokenizer
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier


def _between(expected: float) -> list[float]:
    """A distribution over five levels with that mean."""
    low = min(3, int(expected))
    return [
        max(0.0, 1 - abs(expected - level)) if level in (low, low + 1) else 0.0
        for level in range(5)
    ]


def test_fitted_thresholds_separate_the_levels():
    rng = random.Random(0)
    true_cuts = (0.8, 1.3, 2.7, 3.4)
    rows, levels = [], []
    for _ in range(200):
        expected = rng.uniform(0, 4)
        rows.append(_between(expected))
        levels.append(sum(expected >= cut for cut in true_cuts))
    found = fitted_thresholds(rows, levels)
    assert found == pytest.approx(true_cuts, abs=0.08)
    decision = Decision(certain=1.01, thresholds=found)
    decided = [decide_level(row, decision) for row in rows]
    assert quadratic_weighted_kappa(levels, decided) > 0.97


def test_certain_level_is_kept_if_all_texts_have_one_level():
    rows = [_between(one) for one in (0.9, 1.9, 2.9, 3.9)]
    for level in range(5):
        thresholds = fitted_thresholds(rows, [level] * 4)
        decision = Decision(certain=1.01, thresholds=thresholds)
        for certain in range(5):
            row = [float(other == certain) for other in range(5)]
            assert decide_level(row, decision) == certain


def test_thresholds_find_the_urgent_that_are_asked_for():
    rng = random.Random(0)
    levels = [rng.choices(range(5), (1, 9, 40, 40, 10))[0] for _ in range(1000)]
    rows = [_between(min(4, max(0, rng.gauss(level, 0.8)))) for level in levels]
    urgent = [row for row, level in zip(rows, levels, strict=True) if level <= 1]

    def recall(**demands):
        decision = Decision(thresholds=fitted_thresholds(rows, levels, 0.8, **demands))
        return sum(decide_level(row, decision) <= 1 for row in urgent) / len(urgent)

    assert recall() < 0.75 and recall(urgent_recall=0.9) > 0.85


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
