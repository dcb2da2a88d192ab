"""The decision from predicted probabilities to a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.estimates.decision import (
    decide,
    decide_level,
    expected_costs,
    expected_level,
)
from vllm_semantic_sched.policy.facts.decision import Decision

LIKELIEST = Decision(rule="most_likely")
LEAST_COST = Decision(rule="least_cost")
NEVER = (1.01, 1.01)
SYMMETRIC = Decision(rule="least_cost", missed_cost=(1.0,))


@st.composite
def distributions(draw, levels=None):
    sizes = {"min_size": levels or 1, "max_size": levels or 7}
    weights = draw(st.lists(st.floats(0.001, 1.0), **sizes))
    return tuple(weight / sum(weights) for weight in weights)


@given(distributions(), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=5))
def test_least_cost_chooses_the_cheapest_level(probabilities, costs):
    decision = Decision(rule="least_cost", missed_cost=tuple(costs))
    costs = expected_costs(probabilities, decision)
    assert len(costs) == len(probabilities)
    assert costs[decide_level(probabilities, decision)] == min(costs)


@given(distributions(), st.floats(1.0, 20.0), st.floats(1.0, 5.0))
def test_higher_missed_cost_never_makes_a_request_less_urgent(probabilities, cost, factor):
    cheap = Decision(rule="least_cost", missed_cost=(cost,))
    dear = Decision(rule="least_cost", missed_cost=(cost * factor,))
    assert decide_level(probabilities, dear) <= decide_level(probabilities, cheap)


@pytest.mark.parametrize("decision", [LIKELIEST, SYMMETRIC, LEAST_COST, Decision()])
def test_certain_prediction_gives_its_level(decision):
    for level in range(5):
        assert decide_level([float(other == level) for other in range(5)], decision) == level


def test_equal_costs_give_median_and_high_ones_urgency():
    torn = (0.3, 0.15, 0.05, 0.1, 0.4)
    assert decide_level(torn, LIKELIEST) == 4
    assert decide_level(torn, SYMMETRIC) == 2
    assert decide_level(torn, LEAST_COST) == 0


@given(distributions(5), distributions(5))
def test_thresholds_follow_the_expected_level(one, other):
    calm, urgent = sorted((one, other), key=expected_level, reverse=True)
    decision = Decision(certain=1.01, possible=NEVER)
    assert 0 <= decide_level(urgent, decision) <= decide_level(calm, decision) <= 4


@given(distributions(5))
def test_certain_level_is_taken_as_it_is(probabilities):
    decision = Decision(possible=NEVER)
    level = decide_level(probabilities, decision)
    if max(probabilities) >= decision.certain:
        assert probabilities[level] == max(probabilities)
    else:
        assert level == decide_level(probabilities, Decision(certain=1.01, possible=NEVER))


@given(distributions(), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_possible_emergency_gets_level_1_or_last_but_one(probabilities, one, other):
    cuts = tuple(0.5 + cut for cut in range(len(probabilities) - 1)) or (0.5,)
    off, on = (Decision(thresholds=cuts, possible=each) for each in (NEVER, (one, other)))
    level, last = decide_level(probabilities, off), len(probabilities) - 1
    least = 1 if probabilities[0] >= one else last - 1 if probabilities[0] >= other else last
    expected = min(level, max(1, least))
    assert decide_level(probabilities, on) == expected
    assert (decide(probabilities, on)[1] == "possible") == (expected < level)
    assert decide(probabilities, on, instant=True) == decide(probabilities, off)


@given(distributions())
def test_thresholds_for_another_number_of_levels_are_not_used(probabilities):
    if len(probabilities) != 5:
        assert decide_level(probabilities, Decision()) == decide_level(probabilities, LEAST_COST)


def test_level_at_a_threshold_is_the_less_urgent_one():
    cut = Decision(thresholds=(0.5, 1.5))
    assert decide_level((0.5, 0.5, 0.0), cut) == 1
    assert decide_level((0.51, 0.49, 0.0), cut) == 0
    assert decide_level((0.0, 0.5, 0.5), cut) == 2


@pytest.mark.parametrize("thresholds", [(2.0, 1.0), (1.0, 1.0), (float("nan"),), ()])
def test_thresholds_must_ascend(thresholds):
    with pytest.raises(ValueError, match="thresholds"):
        Decision(thresholds=thresholds)


def test_last_missed_cost_holds_for_all_further_levels():
    assert expected_costs((0.0, 0.0, 1.0, 0.0), Decision(missed_cost=(9.0, 3.0)))[3] == 3.0
