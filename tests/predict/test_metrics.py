"""Figures of merit against values worked out by hand, and scikit-learn where it is there."""

import random

import pytest

from vllm_semantic_sched.predict.metrics import (
    area_under_curve,
    confusion_matrix,
    kendall_tau,
    quadratic_weighted_kappa,
    urgency_report,
)


def test_perfect_constant_and_opposite_guesses():
    truth = [0, 1, 2, 3, 4]
    assert quadratic_weighted_kappa(confusion_matrix(truth, truth, 5)) == pytest.approx(1.0)
    assert quadratic_weighted_kappa(confusion_matrix(truth, [2] * 5, 5)) == pytest.approx(0.0)
    assert quadratic_weighted_kappa(confusion_matrix(truth, truth[::-1], 5)) == pytest.approx(-1.0)


def test_area_counts_ties_half():
    assert area_under_curve([True, False], [0.9, 0.1]) == 1.0
    assert area_under_curve([True, False], [0.5, 0.5]) == 0.5
    assert area_under_curve([True, True], [0.5, 0.5]) is None


def test_tau_by_hand():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2], [5, 5]) == 0.0


def test_agrees_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = random.Random(1)
    truth = [rng.randrange(5) for _ in range(200)]
    rows = [[rng.random() for _ in range(5)] for _ in truth]
    rows = [[share / sum(row) for share in row] for row in rows]
    report = urgency_report(truth, rows, 5)
    guess = [row.index(max(row)) for row in rows]
    assert report["quadratic_weighted_kappa"] == pytest.approx(
        sklearn.cohen_kappa_score(truth, guess, weights="quadratic")
    )
    assert report["balanced_accuracy"] == pytest.approx(
        sklearn.balanced_accuracy_score(truth, guess)
    )
    assert report["auc_level_0_or_1"] == pytest.approx(
        sklearn.roc_auc_score([level <= 1 for level in truth], [sum(row[:2]) for row in rows])
    )
    assert report["confusion"] == sklearn.confusion_matrix(truth, guess).tolist()
