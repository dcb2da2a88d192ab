"""The end of training: temperatures and bounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vllm_semantic_sched.lab.evaluation.examples import Example
from vllm_semantic_sched.lab.evaluation.metrics import expected_calibration_error
from vllm_semantic_sched.lab.training.base import Model
from vllm_semantic_sched.lab.training.bounds import fitted_bounds
from vllm_semantic_sched.lab.training.decision import write_decision
from vllm_semantic_sched.lab.training.fit import autocast, average, length_bucket
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.predict.model import TextPredictor

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
    edges = network.config.length_bucket_edges
    levels = [example.level for example in examples]
    buckets = [length_bucket(example, edges) for example in examples]
    for name, logits, labels in (
        ("temperature", urgency, levels),
        ("length_temperature", length, buckets),
    ):
        known = {place: label for place, label in enumerate(labels) if label is not None}
        if known:
            truth = torch.tensor([*known.values()])
            setattr(network.config, name, best_temperature(logits[[*known]], truth))


def average_for(model: Model, weights: Mapping[str, Tensor], examples: Sequence[Example]) -> float:
    """Average the network with `weights`, another state of it, in the proportion that reads the
    labeled examples best, by the log loss of their levels. Returns the share of `weights`."""
    network = model.network
    leveled = [example for example in examples if example.level is not None]
    truth = torch.tensor([example.level for example in leveled])
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
    rows = tokenizer.encode([example.text for example in examples])
    with torch.inference_mode(), autocast():
        parts = [
            network(*tokenizer.pad(rows[start : start + _TEXTS_PER_PASS]))
            for start in range(0, len(rows), _TEXTS_PER_PASS)
        ]
    urgency, length = zip(*parts, strict=True)
    return torch.cat(urgency).float(), torch.cat(length).float()


def write_bounds(
    model: Path, examples: Sequence[Example], threads: int, urgent_recall: float = 0.0
) -> None:
    """Write to a stored model's folder the decision that agrees best with the levels of `examples`,
    with at least this recall of levels 0 and 1."""
    predictor = TextPredictor.load(str(model), threads)
    predictions = predictor.predict([example.text for example in examples])
    probabilities = [prediction.urgency for prediction in predictions]
    levels = [example.level or 0 for example in examples]
    bounds = fitted_bounds(probabilities, levels, urgent_recall)
    write_decision(model, Decision(bounds))
