"""Thresholds are fitted to the levels of texts, and find the urgent that are asked for."""

import random

import pytest

from vllm_semantic_sched.lab.evaluation.metrics import quadratic_weighted_kappa
from vllm_semantic_sched.lab.training.thresholds import fitted_thresholds
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision


def _between(expected: float) -> list[float]:
    """A distribution over five levels with that mean."""
    low = min(3, int(expected))
    return [
        max(0.0, 1 - abs(expected - level)) if level in (low, low + 1) else 0.0
        for level in range(5)
    ]


def test_fitted_thresholds_separate_the_levels():
    rng = random.Random(0)
    true_cuts = (0.8, 1.3, 2.7, 3.4)
    rows, levels = [], []
    for _ in range(200):
        expected = rng.uniform(0, 4)
        rows.append(_between(expected))
        levels.append(sum(expected >= cut for cut in true_cuts))
    found = fitted_thresholds(rows, levels)
    assert found == pytest.approx(true_cuts, abs=0.08)
    decision = Decision(certain=1.01, thresholds=found)
    decided = [decide_level(row, decision) for row in rows]
    assert quadratic_weighted_kappa(levels, decided) > 0.97


def test_certain_level_is_kept_if_all_texts_have_one_level():
    rows = [_between(one) for one in (0.9, 1.9, 2.9, 3.9)]
    for level in range(5):
        thresholds = fitted_thresholds(rows, [level] * 4)
        decision = Decision(certain=1.01, thresholds=thresholds)
        for certain in range(5):
            row = [float(other == certain) for other in range(5)]
            assert decide_level(row, decision) == certain


def test_thresholds_find_the_urgent_that_are_asked_for():
    rng = random.Random(0)
    levels = [rng.choices(range(5), (1, 9, 40, 40, 10))[0] for _ in range(1000)]
    rows = [_between(min(4, max(0, rng.gauss(level, 0.8)))) for level in levels]
    urgent = [row for row, level in zip(rows, levels, strict=True) if level <= 1]

    def recall(**demands):
        decision = Decision(thresholds=fitted_thresholds(rows, levels, 0.8, **demands))
        return sum(decide_level(row, decision) <= 1 for row in urgent) / len(urgent)

    assert recall() < 0.75 and recall(urgent_recall=0.9) > 0.85
