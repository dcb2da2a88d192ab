"""Fits the thresholds of a decision on the expected level. Needs no torch."""

import math
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from vllm_semantic_sched.lab.evaluation.metrics import disagreement, likeliest
from vllm_semantic_sched.policy.estimates.decision import expected_level

_RESAMPLES = 30  # that thresholds are fitted to
_ASCENTS = 4  # rounds over the thresholds in each
_STEPS = 25  # places for a threshold between its two levels

IntArray = NDArray[numpy.int_]


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
    numpy.add.at(fixed, (numpy.array([likeliest(row) for row in probabilities]), truth), sure)
    expected = numpy.array([expected_level(row) for row in probabilities])
    cells = numpy.minimum(last * _STEPS - 1, (expected * _STEPS).astype(int))
    table = numpy.zeros((last * _STEPS, last + 1))
    numpy.add.at(table, (cells, truth), ~sure)
    highest = _STEPS if certain > 1 else _STEPS * 3 // 2
    least = 1
    if urgent_recall:
        reached = fixed[:2, :2].sum() + table[:, :2].sum(axis=1).cumsum()
        enough = urgent_recall * (truth <= 1).sum()
        least = min(highest, max(1, int(numpy.searchsorted(reached, enough)) + 1 - _STEPS))
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
