"""The end of training: temperature, thresholds, and figures on the validation split."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.policy.estimates.decision import expected_level
from vllm_semantic_sched.predict import URGENCY_LEVELS
from vllm_semantic_sched.predict.evaluation.examples import Example, LabelledSet
from vllm_semantic_sched.predict.evaluation.measure import figures_of, model_guesser
from vllm_semantic_sched.predict.model import TextPredictor
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.text import WindowTokenizer
from vllm_semantic_sched.predict.training.fit import autocast, ranked_probability_score
from vllm_semantic_sched.predict.training.messages import level_message
from vllm_semantic_sched.predict.training.mixture import Sources
from vllm_semantic_sched.predict.training.visits import ktas_message

IntArray = NDArray[numpy.int_]

_PER_PART = 2000
# Resamples that thresholds are fitted to, rounds over the thresholds in each, and places for a
# threshold between its two levels.
_RESAMPLES = 30
_ASCENTS = 4
_STEPS = 25


def calibrate(
    network: UrgencyLengthClassifier, tokenizer: WindowTokenizer, examples: Sequence[Example]
) -> None:
    """Store in the configuration the temperature of the urgency head that fits the examples with a
    level best; leaves it at 1 if there are none.

    Best by the ranked probability score, as in the training loss: under the log loss a few
    confident mistakes would set the temperature for all texts.
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

    Each lies between its two levels. Kappa is flat and rugged around its maximum, so the thresholds
    are means over many resamples of the texts.
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
        Example(level_message(level, rng), level)
        for level in range(URGENCY_LEVELS)
        for _ in range(_PER_PART // 10)
    ]
    pairs = [*sources.prompts, *sources.questions]
    chosen = rng.sample(pairs, min(_PER_PART, len(pairs)))
    return {
        "NHAMCS visits": [Example(visit.text, visit.level) for visit in visits],
        "KTAS visits": [Example(ktas_message(visit, rng), visit.level) for visit in sources.ktas],
        "generated messages": messages,
        "written messages": list(sources.written),
        "prompts and questions": [Example(pair.text, 4, pair.output_tokens) for pair in chosen],
    }


def validation_figures(model: Path, sources: Sources, seed: int) -> dict[str, dict[str, Any]]:
    """`figures_of` the stored model on each part of the validation split, at the most likely
    level."""
    predictor = TextPredictor.load(str(model), torch.get_num_threads())
    guesser = model_guesser(predictor, texts_per_call=_PER_PART)
    figures = {}
    for name, examples in validation_parts(sources, seed).items():
        guess = guesser([example.text for example in examples])
        decision = Decision(rule="most_likely")
        figures[name] = figures_of(LabelledSet(name, examples), guess, decision)
    return figures
