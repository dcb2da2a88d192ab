"""Figures of merit against values worked out by hand, and properties that always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.lab.evaluation.metrics import (
    area_under_curve,
    confusion_matrix,
    deciles,
    expected_calibration_error,
    group_figures,
    kendall_tau,
    length_figures,
    level_figures,
    quadratic_weighted_kappa,
    reliability,
)
from vllm_semantic_sched.policy.facts.decision import Decision

LEVELS = 5
PRICES = Decision().missed_cost


def certain(level):
    """All probability on one level."""
    return tuple(float(one == level) for one in range(LEVELS))


@st.composite
def labeled_rows(draw):
    truth = draw(st.lists(st.integers(0, LEVELS - 1), min_size=1, max_size=30))
    weights = st.lists(st.integers(0, 9), min_size=LEVELS, max_size=LEVELS).filter(any)
    rows = [draw(weights) for _ in truth]
    return truth, [[share / sum(row) for share in row] for row in rows]


def test_level_figures_by_hand():
    decided = [0, 2, 1, 4, 3]
    figures = level_figures([0, 1, 2, 4, 4], list(map(certain, decided)), Decision())
    assert figures["n_level"] == 5
    assert figures["accuracy"] == pytest.approx(2 / 5)
    assert figures["recall"] == [1.0, 0.0, 0.0, None, 0.5]
    assert figures["precision"] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert figures["balanced_accuracy"] == pytest.approx(1.5 / 4)
    # 3 levels squared off in all; by chance (5 x 37 + 5 x 30 - 2 x 11 x 10) / 5 = 23
    assert figures["quadratic_weighted_kappa"] == pytest.approx(1 - 3 / 23)
    # Of 2 x 3 pairs: level 0 wins two and ties one, level 1 ties two and loses one.
    assert figures["auc"] == pytest.approx(3.5 / 6)
    assert figures["urgent_recall"] == figures["urgent_precision"] == pytest.approx(1 / 2)
    assert figures["ece"] == pytest.approx(0.6)  # certain, and right in two of five
    # Level 1 is served one level late, and two are served one level early at 1 each.
    assert figures["expected_cost"] == pytest.approx((PRICES[1] + 1 + 1) / 5)
    assert figures["confusion"] == [
        [1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1],
    ]


def test_the_rule_decides_the_level_and_the_price_stays():
    row = (0.3, 0.0, 0.0, 0.0, 0.7)
    careful = level_figures([0], [row], Decision())
    assert careful["recall"][0] == 1.0 and careful["expected_cost"] == 0.0
    for careless in (
        Decision(bounds=(0.5, 0.5, 0.5, 0.5)),
        Decision(missed_cost=(1.0,)),
    ):
        figures = level_figures([0], [row], careless)
        assert figures["recall"][0] == 0.0
        assert figures["expected_cost"] == 4 * PRICES[0]  # four levels late, at default prices
        assert figures["ece"] == careful["ece"]


def test_urgent_recall_and_precision_are_told_apart():
    figures = level_figures([0, 1, 1, 4], list(map(certain, [1, 2, 3, 0])), Decision())
    assert figures["urgent_recall"] == pytest.approx(1 / 3)  # level 0 at 1 is still urgent
    assert figures["urgent_precision"] == pytest.approx(1 / 2)


def test_precision_of_a_level_that_is_never_decided_is_undefined():
    figures = level_figures([2, 3], [certain(2), certain(2)], Decision())
    assert figures["precision"] == [None, None, 0.5, None, None]
    assert figures["auc"] is None and figures["urgent_recall"] is None
    assert figures["urgent_precision"] is None


@given(labeled_rows())
def test_level_figures_stay_within_their_range(case):
    truth, rows = case
    figures = level_figures(truth, rows, Decision())
    assert sum(map(sum, figures["confusion"])) == len(truth)
    for key in ("accuracy", "balanced_accuracy", "auc", "urgent_recall", "urgent_precision", "ece"):
        assert figures[key] is None or 0 <= figures[key] <= 1 + 1e-9
    kappa = figures["quadratic_weighted_kappa"]
    assert kappa is None or -1 - 1e-9 <= kappa <= 1 + 1e-9
    assert figures["expected_cost"] >= 0
    assert (figures["expected_cost"] == 0) == (figures["accuracy"] == 1)


@given(st.lists(st.integers(0, LEVELS - 1), min_size=1, max_size=30))
def test_knowing_the_truth_is_perfect(truth):
    figures = level_figures(truth, list(map(certain, truth)), Decision())
    assert figures["accuracy"] == figures["balanced_accuracy"] == 1
    assert figures["ece"] == figures["expected_cost"] == 0
    assert figures["quadratic_weighted_kappa"] in (None, pytest.approx(1))


def test_kappa_of_perfect_constant_and_opposite_guesses():
    truth = [0, 1, 2, 3, 4]
    assert quadratic_weighted_kappa(truth, truth) == pytest.approx(1.0)
    assert quadratic_weighted_kappa(truth, [2] * 5) == pytest.approx(0.0)
    assert quadratic_weighted_kappa(truth, truth[::-1]) == pytest.approx(-1.0)
    assert quadratic_weighted_kappa([4, 4], [4, 4]) is None


def test_confusion_has_the_truth_in_rows():
    assert confusion_matrix([0, 0, 1], [1, 1, 1], 2) == [[0, 2], [0, 1]]


def test_area_counts_ties_half():
    assert area_under_curve([True, False], [0.9, 0.1]) == 1.0
    assert area_under_curve([True, False], [0.5, 0.5]) == 0.5
    assert area_under_curve([True, True], [0.5, 0.5]) is None


def test_calibration_by_hand():
    # Twice 0.61 and right once, once 0.92 and right.
    rows = [(0.61, 0.39), (0.61, 0.39), (0.08, 0.92)]
    assert expected_calibration_error([0, 1, 1], rows) == pytest.approx(
        (2 * (0.61 - 0.5) + 1 * (1 - 0.92)) / 3
    )
    bins = reliability([0, 1, 1], rows)
    assert len(bins) == 15
    assert bins[9] == {
        "low": pytest.approx(0.6),
        "high": pytest.approx(10 / 15),
        "n": 2,
        "confidence": pytest.approx(0.61),
        "accuracy": 0.5,
    }
    assert bins[13]["n"] == 1 and bins[0] == {
        "low": 0.0,
        "high": pytest.approx(1 / 15),
        "n": 0,
        "confidence": None,
        "accuracy": None,
    }
    assert reliability([0], [(1.0, 0.0)])[14]["n"] == 1
    assert expected_calibration_error([], []) is None


def test_groups_by_hand():
    figures = group_figures(
        ["plain", "news", "plain", "news", "news"], [0, 4, 2, 4, 4], [1, 4, 0, 3, 0]
    )
    assert list(figures) == ["plain", "news"]
    assert figures["plain"] == {
        "n": 2,
        "accuracy": 0.0,
        "kappa": pytest.approx(-2 / 3),
        "recall_within_one": 0.5,
        "recall_of_0": 0.0,
        "found_of_0": 1.0,
        "missed_of_0": 0.0,
        "urgent_recall": 1.0,
        "false_alarms": None,
    }
    assert figures["news"]["accuracy"] == pytest.approx(1 / 3)
    assert figures["news"]["false_alarms"] == pytest.approx(1 / 3)
    assert figures["news"]["recall_of_0"] is figures["news"]["found_of_0"] is None


def test_tau_by_hand():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    # tau-b: 2 pairs agree, one is tied in the scores: 2 / sqrt(3 x 2)
    assert kendall_tau([1, 2, 3], [1, 1, 2]) == pytest.approx(2 / 6**0.5)
    assert kendall_tau([1, 2], [5, 5]) == 0.0


def test_deciles_by_hand():
    assert deciles(range(10)) == list(range(10))
    assert deciles([30, 10, 20]) == [8, 1, 5]
    assert deciles(list(range(20)))[:4] == [0, 0, 1, 1]
    assert deciles([7.0] * 4) == [5] * 4
    assert deciles([1, 1, 2, 2]) == [2, 2, 7, 7]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_deciles_of_equal_values_match_and_never_fall(values):
    placed = dict(zip(values, deciles(values), strict=True))
    assert [placed[value] for value in values] == deciles(values)
    assert sorted(placed.values()) == [placed[value] for value in sorted(placed)]
    assert set(placed.values()) <= set(range(10))


def test_length_figures_by_hand():
    figures = length_figures([10, 20, 30, 40], [12.0, 14.0, 33.0, 32.0])
    assert figures["n_length"] == 4
    assert figures["kendall_tau"] == pytest.approx(4 / 6)
    assert figures["decile_accuracy"] == pytest.approx(2 / 4)
    assert figures["mean_absolute_error_tokens"] == pytest.approx((2 + 6 + 3 + 8) / 4)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=40, unique=True))
def test_the_right_order_is_perfect_at_any_scale(lengths):
    figures = length_figures(lengths, [3.0 * tokens + 7 for tokens in lengths])
    assert figures["kendall_tau"] == pytest.approx(1)
    assert figures["decile_accuracy"] == 1
