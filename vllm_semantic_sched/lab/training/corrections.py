"""Refits the decision to corrections, and says how many emergencies may be missed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy
from scipy.stats import beta

from vllm_semantic_sched.lab.evaluation.metrics import disagreement, mean, quadratic_weighted_kappa
from vllm_semantic_sched.lab.training.bounds import fitted_bounds
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.predict.corrections import Correction

LEAST = 50
"""Corrections without which nothing is fitted."""

_FOLDS = 5
_PRIOR = 200  # corrections that the present bounds weigh as much as
_RESAMPLES = 400
_SURE = 0.9  # share of the resamples in which a refit must be no worse
_LAST_FOUND = 1  # level; a request of level 0 that is served later counts as missed


class Refit(NamedTuple):
    """The decision refitted to all corrections; quadratic weighted kappa and recall of level 0
    before it, and after refits to the other folds, None where undefined; and whether it is better:
    kappa higher with some certainty, and no fewer found of level 0."""

    decision: Decision
    before: tuple[float | None, float | None]
    after: tuple[float | None, float | None]
    better: bool


def refit(corrections: Sequence[Correction], decision: Decision) -> Refit:
    """Fit `decision.bounds` to corrections, all with as many levels, and judge every correction
    once by bounds fitted without it (five folds). ValueError for fewer than `LEAST`
    corrections."""
    if len(corrections) < LEAST:
        raise ValueError(f"{len(corrections)} corrections; a refit needs at least {LEAST}")
    shuffled = random.Random(0).sample(list(corrections), len(corrections))
    truth = [correction.corrected for correction in shuffled]
    present = [decide_level(correction.probabilities, decision) for correction in shuffled]
    held_out = [0] * len(shuffled)
    for fold in range(_FOLDS):
        others = [correction for place, correction in enumerate(shuffled) if place % _FOLDS != fold]
        fitted = _fitted(others, decision)
        for place in range(fold, len(shuffled), _FOLDS):
            held_out[place] = decide_level(shuffled[place].probabilities, fitted)
    return Refit(
        decision=_fitted(shuffled, decision),
        before=figures(truth, present),
        after=figures(truth, held_out),
        better=_is_better(truth, present, held_out),
    )


def figures(truth: Sequence[int], decided: Sequence[int]) -> tuple[float | None, float | None]:
    """Quadratic weighted kappa, and the share of level 0 that is decided at 0."""
    worst = [level for true, level in zip(truth, decided, strict=True) if true == 0]
    return quadratic_weighted_kappa(truth, decided), mean([level == 0 for level in worst])


def _fitted(corrections: Sequence[Correction], decision: Decision) -> Decision:
    """Bounds between the present ones and those that fit the corrections best: the fewer
    corrections, the closer to the present ones."""
    rows = [correction.probabilities for correction in corrections]
    levels = [correction.corrected for correction in corrections]
    fits = fitted_bounds(rows, levels)
    weight = len(rows) / (len(rows) + _PRIOR)
    present = decision.bounds if len(decision.bounds) == len(fits) else fits
    bounds = tuple(
        round(weight * new + (1 - weight) * old, 2) for new, old in zip(fits, present, strict=True)
    )
    return replace(decision, bounds=bounds)


def _is_better(truth: Sequence[int], present: Sequence[int], refitted: Sequence[int]) -> bool:
    """Whether the refit finds no fewer of level 0, and its kappa is no lower in most resamples."""
    kappa, recall = figures(truth, present)
    new_kappa, new_recall = figures(truth, refitted)
    if kappa is None or new_kappa is None or new_kappa <= kappa:
        return False
    if recall is not None and new_recall is not None and new_recall < recall:
        return False
    levels = max(*truth, *present, *refitted) + 1
    cells = numpy.zeros((levels, levels, levels))  # by true, present and refitted level
    numpy.add.at(cells, (truth, present, refitted), 1)
    shares = cells.ravel() / len(truth)
    drawn = numpy.random.default_rng(0).multinomial(len(truth), shares, size=_RESAMPLES)
    drawn = drawn.reshape(-1, levels, levels, levels)
    worse = disagreement(drawn.sum(axis=2)) > disagreement(drawn.sum(axis=3))
    return bool(worse.mean() <= 1 - _SURE)


class Missed(NamedTuple):
    """Level-0 requests among those drawn at random, how many of them were served at level 2 or
    later, and the upper 95 % bounds of that share: of all level-0 requests, and of all requests."""

    sampled: int
    emergencies: int
    missed: int
    of_emergencies: float
    of_requests: float


def missed_emergencies(corrections: Sequence[Correction]) -> Missed:
    """What requests drawn at random say about all. Those that somebody noticed say nothing about
    the rest: looking only at calm levels finds only missed emergencies."""
    sampled = [correction for correction in corrections if correction.sampled]
    worst = [correction for correction in sampled if correction.corrected == 0]
    missed = sum(correction.level > _LAST_FOUND for correction in worst)
    return Missed(
        sampled=len(sampled),
        emergencies=len(worst),
        missed=missed,
        of_emergencies=upper_bound(missed, len(worst)),
        of_requests=upper_bound(missed, len(sampled)),
    )


def upper_bound(hits: int, tries: int) -> float:
    """One-sided upper 95 % bound of a share (Clopper and Pearson, 1934)."""
    return 1.0 if hits >= tries else float(beta.ppf(0.95, hits + 1, tries - hits))
