"""The end of training: temperatures and thresholds."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.evaluation.metrics import (
    disagreement,
    expected_calibration_error,
    likeliest,
)
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.fit import autocast, average, length_bucket
from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.policy.estimates.decision import expected_level
from vllm_semantic_sched.predict.model import TextPredictor

THRESHOLDS_FILE = "thresholds.yaml"
"""In the folder of a trained model: a policy with the fitted `decision.thresholds`."""

IntArray = NDArray[numpy.int_]

_RESAMPLES = 30  # that thresholds are fitted to
_ASCENTS = 4  # rounds over the thresholds in each
_STEPS = 25  # places for a threshold between its two levels

_TEMPERATURES = tuple(round(0.5 + 0.05 * step, 2) for step in range(71))
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.5)  # of the weights before training
_TEXTS_PER_PASS = 64


def calibrate(model: Model, examples: Sequence[Example]) -> None:
    """Store the temperature of each head that gives the labeled examples the lowest calibration
    error; leaves that of a head without labels.

    Give texts that people wrote: on generated, easier ones a model becomes overconfident. In the
    log loss the few surely misread texts would dominate, and make all others look less sure.
    """
    if not examples:
        return
    network = model.network
    urgency, length = _logits(model, examples)
    levels = [one.level for one in examples]
    buckets = [length_bucket(one, network.config.length_bucket_edges) for one in examples]
    for name, logits, labels in (
        ("temperature", urgency, levels),
        ("length_temperature", length, buckets),
    ):
        known = {at: label for at, label in enumerate(labels) if label is not None}
        if known:
            truth = torch.tensor([*known.values()])
            setattr(network.config, name, best_temperature(logits[[*known]], truth))


def average_for(model: Model, weights: Mapping[str, Tensor], examples: Sequence[Example]) -> float:
    """Average the network with `weights`, another state of it, in the proportion that reads the
    labeled examples best, by the log loss of their levels. Returns the share of `weights`."""
    network = model.network
    leveled = [one for one in examples if one.level is not None]
    truth = torch.tensor([one.level for one in leveled])
    trained = {name: value.clone() for name, value in network.state_dict().items()}

    def loss(share: float) -> float:
        network.load_state_dict(trained)
        average(network, weights, share)
        logits, _ = _logits(model, leveled)
        return float(functional.cross_entropy(logits, truth))

    best = min(_SHARES, key=loss)
    network.load_state_dict(trained)
    average(network, weights, best)
    return best


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """What to divide logits (texts, classes) by for the lowest expected calibration error."""
    truth = labels.tolist()

    def error(temperature: float) -> float:
        rows = torch.softmax(logits / temperature, dim=1).tolist()
        return expected_calibration_error(truth, rows) or 0.0

    return min(_TEMPERATURES, key=error)


def _logits(model: Model, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Logits of both heads in evaluation mode: (texts, levels) and (texts, buckets)."""
    network, tokenizer, _ = model
    network.eval()
    rows = tokenizer.encode([one.text for one in examples])
    with torch.inference_mode(), autocast():
        parts = [
            network(*tokenizer.pad(rows[start : start + _TEXTS_PER_PASS]))
            for start in range(0, len(rows), _TEXTS_PER_PASS)
        ]
    urgency, length = zip(*parts, strict=True)
    return torch.cat(urgency).float(), torch.cat(length).float()


def fitted_thresholds(
    probabilities: Sequence[Sequence[float]],
    levels: Sequence[int],
    certain: float = math.inf,
    urgent_recall: float = 0.0,
) -> tuple[float, ...]:
    """Thresholds on the expected level (`Decision.thresholds`) that give these texts the highest
    quadratic weighted kappa; means over many resamples, as kappa is flat and rugged there.

    Args:
        certain: texts with a level at least this probable get that level (`Decision.certain`).
            Without such texts a threshold must lie between its two levels.
        urgent_recall: least share of the texts of levels 0 and 1 that are to get one of them.
    """
    last = len(probabilities[0]) - 1
    sure = numpy.array([max(row) >= certain for row in probabilities])
    truth = numpy.asarray(levels)
    fixed = numpy.zeros((last + 1, last + 1))  # by decided and by true level
    decided = numpy.array([likeliest(row) for row in probabilities])
    numpy.add.at(fixed, (decided, truth), sure)
    expected = numpy.array([expected_level(row) for row in probabilities])
    cells = numpy.minimum(last * _STEPS - 1, (expected * _STEPS).astype(int))
    table = numpy.zeros((last * _STEPS, last + 1))
    numpy.add.at(table, (cells, truth), ~sure)
    highest = _STEPS if certain > 1 else _STEPS * 3 // 2
    least = 1
    if urgent_recall:
        found = fixed[:2, :2].sum() + table[:, :2].sum(axis=1).cumsum()
        enough = urgent_recall * (truth <= 1).sum()
        least = min(highest, max(1, int(numpy.searchsorted(found, enough)) + 1 - _STEPS))
    ranges = [(least if place == 1 else 1, highest) for place in range(last)]
    many = int(table.sum())
    shares = table.ravel() / max(1, many)
    resamples = numpy.random.default_rng(0).multinomial(many, shares, size=_RESAMPLES)
    fits = [_best_cuts(counts.reshape(table.shape), fixed, ranges) for counts in resamples]
    return tuple(round(float(cut), 2) for cut in numpy.mean(fits, axis=0) / _STEPS)


def _best_cuts(
    table: IntArray, fixed: NDArray[numpy.float64], ranges: Sequence[tuple[int, int]]
) -> IntArray:
    """Coordinate ascent from the middles between the levels. `table`: texts by place of the
    expected level, in steps, and by true level; `fixed`: other texts, by decided and by true level;
    `ranges`: least and greatest distance of each threshold from the level before it, in steps."""
    below = numpy.vstack([numpy.zeros_like(table[:1]), table.cumsum(axis=0)])
    first = [level * _STEPS + max(_STEPS // 2, least) for level, (least, _) in enumerate(ranges)]
    cuts = numpy.array([0, *first, 2 * len(table)])
    for _ in range(_ASCENTS):
        for place, (least, most) in enumerate(ranges, 1):
            start = (place - 1) * _STEPS
            lowest = max(start + least, cuts[place - 1] + 1)
            others = numpy.arange(lowest, min(start + most + 1, cuts[place + 1]))
            tried = numpy.tile(cuts, (len(others) + 1, 1))
            tried[1:, place] = others
            decided = numpy.diff(below[numpy.minimum(tried, len(table))], axis=1) + fixed
            cuts = tried[disagreement(decided).argmin()]
    return cuts[1:-1]


def write_thresholds(
    model: Path, examples: Sequence[Example], threads: int, urgent_recall: float = 0.0
) -> None:
    """Write to a stored model's folder a policy that cuts its expected level where it agrees best
    with the levels of `examples`, with at least this recall of levels 0 and 1."""
    predictor = TextPredictor.load(str(model), threads)
    probabilities = [one.urgency for one in predictor.predict([one.text for one in examples])]
    levels = [one.level or 0 for one in examples]
    thresholds = fitted_thresholds(probabilities, levels, Decision().certain, urgent_recall)
    decision = {"rule": "thresholds", "thresholds": list(thresholds)}
    text = yaml.safe_dump({"decision": decision}, default_flow_style=None, sort_keys=False)
    (model / THRESHOLDS_FILE).write_text(text, encoding="utf-8")
