"""Bounds are fitted to the levels of texts, and find the urgent that are asked for."""

import random

import numpy
import pytest

from vllm_semantic_sched.lab.evaluation.metrics import quadratic_weighted_kappa
from vllm_semantic_sched.lab.training.bounds import fitted_bounds
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision


def read_as(level: float, spread: float = 0.7) -> list[float]:
    """A distribution over five levels around a place between them."""
    weights = [numpy.exp(-(((other - level) / spread) ** 2)) for other in range(5)]
    return [float(weight / sum(weights)) for weight in weights]


def test_fitted_bounds_separate_the_levels():
    rng = random.Random(0)
    true = Decision(bounds=(0.3, 0.2, 0.6, 0.4))
    rows = [read_as(rng.uniform(-0.5, 4.5)) for _ in range(400)]
    levels = [decide_level(row, true) for row in rows]
    bounds = fitted_bounds(rows, levels)
    assert bounds == pytest.approx(true.bounds, abs=0.06)
    decided = [decide_level(row, Decision(bounds)) for row in rows]
    assert quadratic_weighted_kappa(levels, decided) > 0.97


def test_certain_level_is_kept_if_all_texts_have_one_level():
    rows = [read_as(place) for place in (0.9, 1.9, 2.9, 3.9)]
    for level in range(5):
        decision = Decision(fitted_bounds(rows, [level] * 4))
        for certain in range(5):
            row = [float(other == certain) for other in range(5)]
            assert decide_level(row, decision) == certain


def test_bounds_find_the_urgent_that_are_asked_for():
    rng = random.Random(0)
    levels = [rng.choices(range(5), (1, 9, 40, 40, 10))[0] for _ in range(1000)]
    rows = [read_as(min(4, max(0, rng.gauss(level, 0.8))), 1.2) for level in levels]
    urgent = [row for row, level in zip(rows, levels, strict=True) if level <= 1]

    def recall(**demands):
        decision = Decision(fitted_bounds(rows, levels, **demands))
        return sum(decide_level(row, decision) <= 1 for row in urgent) / len(urgent)

    assert recall() < 0.8 and recall(urgent_recall=0.9) > 0.88


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_bounds_fit_any_number_of_levels(levels):
    rows = [[float(other == level) for other in range(levels)] for level in range(levels)] * 5
    truth = [*range(levels)] * 5
    decision = Decision(fitted_bounds(rows, truth, urgent_recall=0.5))
    assert [decide_level(row, decision) for row in rows] == truth
