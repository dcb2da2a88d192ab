"""The decision from predicted probabilities to a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config.estimates import Decision
from vllm_semantic_sched.policy.estimates.decision import (
    decide_level,
    expected_cost,
    expected_level,
)

LIKELIEST = Decision(rule="most_likely")
THRESHOLDS = Decision(rule="thresholds")
SYMMETRIC = Decision(missed_cost=(1.0,))


@st.composite
def distributions(draw):
    weights = draw(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7))
    return tuple(weight / sum(weights) for weight in weights)


@given(distributions(), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=5))
def test_least_cost_chooses_the_cheapest_level(probabilities, costs):
    decision = Decision(missed_cost=tuple(costs))
    decided = expected_cost(probabilities, decide_level(probabilities, decision), decision)
    for level in range(len(probabilities)):
        assert decided <= expected_cost(probabilities, level, decision)


@given(distributions(), st.floats(1.0, 20.0), st.floats(1.0, 5.0))
def test_higher_missed_cost_never_makes_a_request_less_urgent(probabilities, cost, factor):
    cheap, dear = Decision(missed_cost=(cost,)), Decision(missed_cost=(cost * factor,))
    assert decide_level(probabilities, dear) <= decide_level(probabilities, cheap)


@pytest.mark.parametrize("decision", [LIKELIEST, SYMMETRIC, THRESHOLDS, Decision()])
def test_certain_prediction_gives_its_level(decision):
    for level in range(5):
        assert decide_level([float(other == level) for other in range(5)], decision) == level


def test_equal_costs_give_the_median_and_high_missed_costs_urgency():
    torn = (0.3, 0.15, 0.05, 0.1, 0.4)
    assert decide_level(torn, LIKELIEST) == 4
    assert decide_level(torn, SYMMETRIC) == 2
    assert decide_level(torn, Decision()) == 0


@given(distributions(), distributions())
def test_thresholds_follow_the_expected_level(one, other):
    calm, urgent = sorted((one, other), key=expected_level, reverse=True)
    levels = [decide_level(probabilities, THRESHOLDS) for probabilities in (urgent, calm)]
    if len(one) == len(other):
        assert levels[0] <= levels[1]
    assert all(0 <= level < len(row) for level, row in zip(levels, (urgent, calm), strict=True))


def test_level_at_a_threshold_is_the_less_urgent_one():
    cut = Decision(rule="thresholds", thresholds=(0.5, 1.5))
    assert decide_level((0.5, 0.5, 0.0), cut) == 1
    assert decide_level((0.51, 0.49, 0.0), cut) == 0
    assert decide_level((0.0, 0.5, 0.5), cut) == 2


@pytest.mark.parametrize("thresholds", [(2.0, 1.0), (1.0, 1.0), (float("nan"),), ()])
def test_thresholds_must_ascend(thresholds):
    with pytest.raises(ValueError, match="thresholds"):
        Decision(thresholds=thresholds)


def test_last_missed_cost_holds_for_all_further_levels():
    assert expected_cost((0.0, 0.0, 1.0, 0.0), 3, Decision(missed_cost=(9.0, 3.0))) == 3.0
