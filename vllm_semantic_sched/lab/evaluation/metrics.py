"""Figures of merit for levels (rows of probabilities, level 0 first) and for output lengths.

A figure that the data does not define is None.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray
from scipy.stats import kendalltau, rankdata
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from vllm_semantic_sched.policy.estimates.decision import decide_level, mistake_cost
from vllm_semantic_sched.policy.facts.decision import Decision

LAST_URGENT_LEVEL = 1
"""Levels up to this one are urgent, in `auc`, `urgent_recall` and `urgent_precision`."""
FIRST_CALM_LEVEL = 3
"""Levels from this one on are not urgent, in `false_alarms`."""

CALIBRATION_BINS = 15
_DECILES = 10


def confusion_matrix(truth: Sequence[int], guess: Sequence[int], levels: int) -> list[list[int]]:
    """Counts; row = true level, column = predicted level."""
    counts = Counter(zip(truth, guess, strict=True))
    return [[counts[true, predicted] for predicted in range(levels)] for true in range(levels)]


def quadratic_weighted_kappa(truth: Sequence[int], guess: Sequence[int]) -> float | None:
    """Agreement beyond chance, weighted by squared distance (Cohen, 1968); None if both are one and
    the same constant: then chance alone agrees fully."""
    if len({*truth, *guess}) < 2:
        return None
    labels = list(range(max(*truth, *guess) + 1))
    return float(cohen_kappa_score(truth, guess, labels=labels, weights="quadratic"))


def disagreement(tables: NDArray[Any]) -> NDArray[numpy.float64]:
    """1 - quadratic weighted kappa of tables (..., levels, levels) of counts, by the true and by
    the decided level; 0 where kappa is undefined."""
    levels = range(tables.shape[-1])
    distance = numpy.square(numpy.subtract.outer(levels, levels))
    rows = tables.sum(axis=-1)
    columns = tables.sum(axis=-2)
    by_chance = numpy.einsum("...t,...d,td->...", rows, columns, distance)
    seen = numpy.einsum("...td,td->...", tables, distance) * rows.sum(axis=-1)
    shares: NDArray[numpy.float64] = seen / numpy.maximum(1, by_chance)
    return shares


def area_under_curve(positive: Sequence[bool], scores: Sequence[float]) -> float | None:
    """Probability that a positive scores above a negative, ties half; None without both kinds."""
    if all(positive) or not any(positive):
        return None
    return float(roc_auc_score(positive, scores))


def reliability(
    truth: Sequence[int], probabilities: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """How often the most likely level is right, by the probability that it was given: one entry for
    each of 15 bins of equal width with its `low` (inclusive) and `high`, `n`, and the mean
    `confidence` and `accuracy` within, None where the bin is empty."""
    members: list[list[tuple[float, bool]]] = [[] for _ in range(CALIBRATION_BINS)]
    for true, row in zip(truth, probabilities, strict=True):
        confidence = max(row)
        place = min(CALIBRATION_BINS - 1, int(confidence * CALIBRATION_BINS))
        members[place].append((confidence, likeliest(row) == true))
    return [
        {
            "low": place / CALIBRATION_BINS,
            "high": (place + 1) / CALIBRATION_BINS,
            "n": len(part),
            "confidence": mean([confidence for confidence, _ in part]),
            "accuracy": mean([right for _, right in part]),
        }
        for place, part in enumerate(members)
    ]


def expected_calibration_error(
    truth: Sequence[int], probabilities: Sequence[Sequence[float]]
) -> float | None:
    """Mean gap between confidence and accuracy over the bins of `reliability`, each weighted by
    its members (Guo et al., 2017); 0 to 1, None without texts."""
    bins = [part for part in reliability(truth, probabilities) if part["n"]]
    gaps = [part["n"] * abs(part["confidence"] - part["accuracy"]) for part in bins]
    return sum(gaps) / len(truth) if truth else None


def level_figures(
    truth: Sequence[int], probabilities: Sequence[Sequence[float]], decision: Decision
) -> dict[str, Any]:
    """All figures for urgency levels, given the true level and the probability per level of each
    text. `auc` and `ece` do not depend on the decision, and `expected_cost` charges every rule the
    default `Decision`'s price, so that rules can be compared."""
    levels = len(probabilities[0]) if probabilities else 0
    decided = [decide_level(row, decision) for row in probabilities]
    pairs = list(zip(truth, decided, strict=True))
    confusion = confusion_matrix(truth, decided, levels)
    recall = _right_of_each(confusion)
    last = LAST_URGENT_LEVEL
    prices = Decision()
    urgent_shares = [math.fsum(row[: last + 1]) for row in probabilities]
    return {
        "n_level": len(truth),
        "accuracy": mean([true == level for true, level in pairs]),
        "balanced_accuracy": mean([share for share in recall if share is not None]),
        "quadratic_weighted_kappa": quadratic_weighted_kappa(truth, decided),
        "recall": recall,
        "precision": _right_of_each([*zip(*confusion, strict=True)]),
        "auc": area_under_curve([true <= last for true in truth], urgent_shares),
        "urgent_precision": mean([true <= last for true, level in pairs if level <= last]),
        **_at_the_ends(pairs),
        "ece": expected_calibration_error(truth, probabilities),
        "expected_cost": mean([mistake_cost(true, level, prices) for true, level in pairs]),
        "confusion": confusion,
    }


def _right_of_each(rows: Sequence[Sequence[int]]) -> list[float | None]:
    """The diagonal of a matrix as shares of its rows."""
    return [row[level] / sum(row) if any(row) else None for level, row in enumerate(rows)]


def group_figures(
    groups: Sequence[str], truth: Sequence[int], decided: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Per group of texts, in order of appearance: how often the decided level is right.

    `kappa` has quadratic weights. `recall_within_one` counts a level that is off by one as right.
    For shares of the most and the least urgent texts see `_at_the_ends`.
    """
    members: dict[str, list[tuple[int, int]]] = {}
    for group, true, level in zip(groups, truth, decided, strict=True):
        members.setdefault(group, []).append((true, level))
    figures = {}
    for group, pairs in members.items():
        true_levels, decided_levels = zip(*pairs, strict=True)
        figures[group] = {
            "n": len(pairs),
            "accuracy": mean([true == level for true, level in pairs]),
            "kappa": quadratic_weighted_kappa(true_levels, decided_levels),
            "recall_within_one": mean([abs(true - level) <= 1 for true, level in pairs]),
            **_at_the_ends(pairs),
        }
    return figures


def _at_the_ends(pairs: Sequence[tuple[int, int]]) -> dict[str, float | None]:
    """Of true and decided levels: the shares of level 0 decided at 0, at 0 or 1, and at 4, and
    those of levels 0 and 1, and of 3 and 4, decided at 0 or 1; None where there is none."""
    worst = [level for true, level in pairs if true == 0]
    urgent = [level for true, level in pairs if true <= LAST_URGENT_LEVEL]
    calm = [level for true, level in pairs if true >= FIRST_CALM_LEVEL]
    return {
        "recall_of_0": mean([level == 0 for level in worst]),
        "found_of_0": mean([level <= LAST_URGENT_LEVEL for level in worst]),
        "missed_of_0": mean([level == 4 for level in worst]),
        "urgent_recall": mean([level <= LAST_URGENT_LEVEL for level in urgent]),
        "false_alarms": mean([level <= LAST_URGENT_LEVEL for level in calm]),
    }


def kendall_tau(truth: Sequence[float], scores: Sequence[float]) -> float:
    """Rank correlation tau-b, -1 to 1; 0 where one side is constant and so orders nothing."""
    if len(set(truth)) < 2 or len(set(scores)) < 2:
        return 0.0
    return float(kendalltau(truth, scores).statistic)


def deciles(values: Sequence[float]) -> list[int]:
    """Tenth (0 to 9) of each value within `values` by its rank; equal values share a mean rank."""
    # Twice a mean rank is whole: no rounding at the borders.
    return [int(2 * rank - 1) * _DECILES // (2 * len(values)) for rank in rankdata(values)]


def length_figures(truth: Sequence[int], predicted: Sequence[float]) -> dict[str, Any]:
    """All figures for output lengths, both in tokens. `decile_accuracy` is the share of texts in
    the same tenth of the true as of the predicted lengths: it measures the order, not the scale."""
    same = [true == guess for true, guess in zip(deciles(truth), deciles(predicted), strict=True)]
    gaps = numpy.abs(numpy.asarray(truth, float) - numpy.asarray(predicted, float))
    return {
        "n_length": len(truth),
        "kendall_tau": kendall_tau(truth, predicted),
        "decile_accuracy": mean(same),
        "mean_absolute_error_tokens": mean(gaps.tolist()),
    }


def likeliest(row: Sequence[float]) -> int:
    """The index of the highest probability, the first of equals."""
    return max(range(len(row)), key=row.__getitem__)


def mean(values: Sequence[float]) -> float | None:
    """The mean of the values, None without any."""
    return math.fsum(values) / len(values) if values else None
