"""Fits the bounds of a decision. Needs no torch."""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from vllm_semantic_sched.lab.evaluation.metrics import disagreement

_RESAMPLES = 30  # that bounds are fitted to
_ASCENTS = 4  # rounds over the bounds in each
_STEPS = 50  # a bound is a multiple of 1 / _STEPS
_FIRST = 25  # where the search for each of them starts, in steps

IntArray = NDArray[numpy.int_]


def fitted_bounds(
    probabilities: Sequence[Sequence[float]],
    levels: Sequence[int],
    urgent_recall: float = 0.0,
) -> tuple[float, ...]:
    """Bounds (`Decision.bounds`) that give these texts the highest quadratic weighted kappa; means
    over many resamples, as kappa is flat and rugged there.

    Args:
        urgent_recall: least share of the texts of levels 0 and 1 that are to get one of them.
    """
    truth = numpy.asarray(levels)
    reached = numpy.cumsum(numpy.asarray(probabilities), axis=1)[:, :-1]
    # In steps, rounded up a little: a share that should equal a bound may fall short of it.
    cells = numpy.minimum(_STEPS, ((reached + 1e-6) * _STEPS).astype(int))
    highest = numpy.full(cells.shape[1], _STEPS - 1)
    if urgent_recall and cells.shape[1] > 1 and (truth <= 1).any():
        urgent = numpy.sort(cells[truth <= 1, 1])
        missed = int((1 - urgent_recall) * len(urgent))
        highest[1] = min(_STEPS - 1, max(1, urgent[missed]))
    shares = numpy.full(len(truth), 1 / len(truth))
    drawn = numpy.random.default_rng(0).multinomial(len(truth), shares, size=_RESAMPLES)
    fits = [_best_bounds(cells, truth, counts, highest) for counts in drawn]
    return tuple(round(float(bound), 2) for bound in numpy.mean(fits, axis=0) / _STEPS)


def _best_bounds(cells: IntArray, truth: IntArray, counts: IntArray, highest: IntArray) -> IntArray:
    """Coordinate ascent from the middle. `cells`: (texts, levels - 1), the probability that each
    level and all more urgent ones have together, in steps; `counts`: how often each text counts;
    `highest`: of each bound, in steps."""
    levels = cells.shape[1] + 1
    bounds = numpy.minimum(_FIRST, highest)
    for _ in range(_ASCENTS):
        for place in range(levels - 1):
            reached = numpy.where(cells >= bounds, numpy.arange(levels - 1), levels - 1)
            before = reached[:, :place].min(axis=1, initial=levels - 1)
            after = reached[:, place + 1 :].min(axis=1, initial=levels - 1)
            undecided = before == levels - 1
            fixed = numpy.zeros((levels, levels))  # by true and decided level
            numpy.add.at(fixed, (truth, before), counts * ~undecided)
            # Of the rest, those at or above the bound get this level, those below it the next one.
            rest = numpy.zeros((_STEPS + 1, levels, levels))
            numpy.add.at(rest, (cells[:, place], truth, after), counts * undecided)
            below = numpy.concatenate([numpy.zeros_like(rest[:1]), rest.cumsum(axis=0)])
            tables = fixed + below[:-1]
            tables[:, :, place] += (below[-1] - below[:-1]).sum(axis=2)
            tried = numpy.array([bounds[place], *range(1, highest[place] + 1)])
            bounds[place] = tried[disagreement(tables[tried]).argmin()]
    return bounds
