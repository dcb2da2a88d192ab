"""What training does at its end: calibration, thresholds, and figures on the validation split."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray

from vllm_semantic_sched.policy.estimates.decision import expected_level
from vllm_semantic_sched.predict import render
from vllm_semantic_sched.predict.buckets import expected_tokens
from vllm_semantic_sched.predict.data import WORDINGS, Example, Sources, training_round
from vllm_semantic_sched.predict.fit import ranked_probability_score
from vllm_semantic_sched.predict.metrics import kendall_tau, urgency_report
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import (
    URGENCY_LEVELS,
    UrgencyLengthClassifier,
    autocast,
)
from vllm_semantic_sched.predict.text import WindowTokenizer

IntArray = NDArray[numpy.int_]

_PER_PART = 2000
_CALIBRATION_SCALE = 0.05
# Resamples that thresholds are fitted to, rounds over the thresholds in each, and places for a
# threshold between its two levels.
_RESAMPLES = 30
_ASCENTS = 4
_STEPS = 25


def calibration_examples(sources: Sources, seed: int, scale: float = 1.0) -> list[Example]:
    """Unseen visits, messages and prompts in the proportions that training has; about 5,000 (times
    `scale`)."""
    return training_round(sources, seed, _CALIBRATION_SCALE * scale)


def calibrate(
    network: UrgencyLengthClassifier, tokenizer: WindowTokenizer, examples: Sequence[Example]
) -> None:
    """Store in the configuration the temperature of the urgency head that fits those of
    `examples` best that have a level; leaves it at 1 if none has.

    Best by the ranked probability score, the distance of the training loss. By the log loss a few
    mistakes that the network is sure of would set the temperature for all texts.
    """
    examples = [example for example in examples if example.level is not None]
    if not examples:
        return
    network.eval()
    logits = []
    with torch.inference_mode(), autocast():
        for start in range(0, len(examples), 64):
            texts = [example.text for example in examples[start : start + 64]]
            logits.append(network(*tokenizer.pad(tokenizer.encode(texts)))[0])
    stacked = torch.cat(logits).float()
    levels = torch.tensor([example.level for example in examples])
    candidates = [0.6 + 0.05 * step for step in range(49)]
    losses = [float(ranked_probability_score(stacked / value, levels)) for value in candidates]
    network.config.temperature = round(candidates[losses.index(min(losses))], 2)


def fitted_thresholds(
    probabilities: Sequence[Sequence[float]], levels: Sequence[int]
) -> tuple[float, ...]:
    """Thresholds on the expected level (`Decision.thresholds`) that give these texts the highest
    quadratic weighted kappa.

    Each lies between its two levels, so that a certain level is believed. Kappa is flat and rugged
    around its maximum, so the thresholds are the means of those of many resamples of the texts.
    """
    last = len(probabilities[0]) - 1
    expected = numpy.array([expected_level(row) for row in probabilities])
    cells = numpy.minimum(last * _STEPS - 1, (expected * _STEPS).astype(int))
    table = numpy.zeros((last * _STEPS, last + 1))
    numpy.add.at(table, (cells, numpy.asarray(levels)), 1)
    rng = numpy.random.default_rng(0)
    resamples = rng.multinomial(len(levels), table.ravel() / len(levels), size=_RESAMPLES)
    fits = [_best_cuts(counts.reshape(table.shape)) for counts in resamples]
    return tuple(round(float(cut), 2) for cut in numpy.mean(fits, axis=0) / _STEPS)


def _best_cuts(table: IntArray) -> list[int]:
    """Coordinate ascent from the middles between the levels.

    Args:
        table: texts by place of the expected level, in steps, and by true level.

    Returns:
        A place for each threshold, in steps.
    """
    below = numpy.vstack([numpy.zeros_like(table[:1]), table.cumsum(axis=0)])
    levels = table.shape[1]
    truth = below[-1]
    distance = numpy.square(numpy.subtract.outer(range(levels), range(levels)))

    def disagreement(cuts: list[int]) -> float:
        """1 - kappa."""
        decided = numpy.diff(below[[0, *cuts, len(table)]], axis=0)
        chance = numpy.outer(decided.sum(axis=1), truth) / max(1, truth.sum())
        by_chance = float((distance * chance).sum())
        return float((distance * decided).sum()) / by_chance if by_chance else 0.0

    cuts = [level * _STEPS + _STEPS // 2 for level in range(levels - 1)]
    for _ in range(_ASCENTS):
        for place in range(levels - 1):
            tried = (
                [*cuts[:place], place * _STEPS + step, *cuts[place + 1 :]]
                for step in range(1, _STEPS + 1)
            )
            cuts = min([cuts, *tried], key=disagreement)
    return cuts


def validation_parts(sources: Sources, seed: int) -> dict[str, list[Example]]:
    """Named sets of held-out texts, at most 2,000 each."""
    rng = random.Random(seed)
    visits = rng.sample(sources.visits, min(_PER_PART, len(sources.visits)))
    messages = [
        Example(render.level_message(wording, rng), wording.level)
        for wording in WORDINGS
        for _ in range(_PER_PART // 10)
    ]
    pairs = [*sources.prompts, *sources.questions]
    chosen = rng.sample(pairs, min(_PER_PART, len(pairs)))
    return {
        "NHAMCS visits": [Example(visit.text, visit.level) for visit in visits],
        "KTAS visits": [
            Example(render.ktas_message(visit, rng), visit.level) for visit in sources.ktas
        ],
        "generated messages": messages,
        "written messages": list(sources.written),
        "prompts and questions": [Example(pair.text, 4, pair.output_tokens) for pair in chosen],
    }


def validation_table(model: Path, sources: Sources, seed: int) -> str:
    """A table of the stored model's figures on the validation split."""
    predictor = TextPredictor.load(str(model), torch.get_num_threads())
    lines = [
        f"{'validation':24}{'n':>6}{'accuracy':>10}{'balanced':>10}{'kappa':>8}{'AUC<=1':>8}"
        f"{'tau':>7}  recall of levels"
    ]
    for name, examples in validation_parts(sources, seed).items():
        predictions = predictor.predict([example.text for example in examples])
        truth = [-1 if example.level is None else example.level for example in examples]
        report = urgency_report(truth, [one.urgency for one in predictions], URGENCY_LEVELS)
        tau = ""
        if examples and examples[0].output_tokens is not None and predictor.length_buckets:
            expected = [
                expected_tokens(one.length or (), predictor.length_buckets) for one in predictions
            ]
            tau = f"{kendall_tau([one.output_tokens or 0 for one in examples], expected):.2f}"
        auc = report["auc_level_0_or_1"]
        recall = " ".join("-" if value is None else f"{value:.2f}" for value in report["recall"])
        lines.append(
            f"{name:24}{report['n']:>6}{report['accuracy']:>10.3f}"
            f"{report['balanced_accuracy']:>10.3f}{report['quadratic_weighted_kappa']:>8.2f}"
            f"{'' if auc is None else format(auc, '.2f'):>8}{tau:>7}  {recall}"
        )
    return "\n".join(lines)
