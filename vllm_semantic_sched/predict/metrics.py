"""Figures of merit for ordered levels and for lengths, in pure Python and numpy."""

from collections.abc import Sequence
from typing import Any

import numpy


def confusion_matrix(truth: Sequence[int], guess: Sequence[int], levels: int) -> list[list[int]]:
    """Counts; row = true level, column = predicted level."""
    matrix = [[0] * levels for _ in range(levels)]
    for true, predicted in zip(truth, guess, strict=True):
        matrix[true][predicted] += 1
    return matrix


def quadratic_weighted_kappa(confusion: Sequence[Sequence[int]]) -> float:
    """Agreement beyond chance, weighted by squared distance (Cohen, 1968); 0 if undefined."""
    counts = numpy.asarray(confusion, dtype=float)
    places = numpy.arange(len(counts))
    weights = (places[:, None] - places[None, :]) ** 2
    chance = numpy.outer(counts.sum(1), counts.sum(0)) / max(1.0, counts.sum())
    expected = float((weights * chance).sum())
    return 1.0 - float((weights * counts).sum()) / expected if expected else 0.0


def area_under_curve(positive: Sequence[bool], scores: Sequence[float]) -> float | None:
    """Chance that a positive scores above a negative, ties half; None without both kinds."""
    values = numpy.asarray(scores, dtype=float)
    chosen = numpy.asarray(positive, dtype=bool)
    if chosen.all() or not chosen.any():
        return None
    _, inverse, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    ranks = (numpy.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    wins = ranks[chosen].sum() - chosen.sum() * (chosen.sum() + 1) / 2.0
    return float(wins / (chosen.sum() * (~chosen).sum()))


def kendall_tau(truth: Sequence[float], scores: Sequence[float]) -> float:
    """Rank correlation tau-b, from all pairs: meant for a few thousand values."""
    true = numpy.asarray(truth, dtype=float)
    score = numpy.asarray(scores, dtype=float)
    both = true_pairs = score_pairs = 0.0
    for place in range(1, len(true)):
        true_sign = numpy.sign(true[place:] - true[:-place])
        score_sign = numpy.sign(score[place:] - score[:-place])
        both += float((true_sign * score_sign).sum())
        true_pairs += float(numpy.abs(true_sign).sum())
        score_pairs += float(numpy.abs(score_sign).sum())
    return both / (true_pairs * score_pairs) ** 0.5 if true_pairs and score_pairs else 0.0


def urgency_report(
    truth: Sequence[int], urgency: Sequence[Sequence[float]], levels: int
) -> dict[str, Any]:
    """All figures for the urgency head.

    `urgency[i]` are the level probabilities of text i; the predicted level is the likeliest.
    """
    guess = [max(range(len(row)), key=row.__getitem__) for row in urgency]
    confusion = confusion_matrix(truth, guess, levels)
    recall = [row[level] / sum(row) if sum(row) else None for level, row in enumerate(confusion)]
    known = [value for value in recall if value is not None]
    return {
        "n": len(truth),
        "accuracy": sum(row[level] for level, row in enumerate(confusion)) / max(1, len(truth)),
        "balanced_accuracy": sum(known) / max(1, len(known)),
        "quadratic_weighted_kappa": quadratic_weighted_kappa(confusion),
        "recall": recall,
        "auc_level_0_or_1": area_under_curve(
            [true <= 1 for true in truth], [sum(row[:2]) for row in urgency]
        ),
        "confusion": confusion,
    }
