"""The decision from predicted probabilities to a level."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config.estimates import MissedCosts
from vllm_semantic_sched.policy.estimates.decision import decide_level, expected_costs
from vllm_semantic_sched.policy.facts.decision import Decision, decision_of

LEAST_COST = Decision()
SYMMETRIC = Decision(missed_cost=(1.0,))
BOUNDED = Decision(bounds=(0.2, 0.25, 0.5, 0.5))


@st.composite
def distributions(draw, levels=None):
    sizes = {"min_size": levels or 1, "max_size": levels or 7}
    weights = draw(st.lists(st.floats(0.001, 1.0), **sizes))
    return tuple(weight / sum(weights) for weight in weights)


@given(distributions(), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=5))
def test_least_cost_chooses_the_cheapest_level(probabilities, costs):
    decision = Decision(missed_cost=tuple(costs))
    costs = expected_costs(probabilities, decision)
    assert len(costs) == len(probabilities)
    assert costs[decide_level(probabilities, decision)] == min(costs)


@given(distributions(), st.floats(1.0, 20.0), st.floats(1.0, 5.0))
def test_higher_missed_cost_never_makes_a_request_less_urgent(probabilities, cost, factor):
    cheap = Decision(missed_cost=(cost,))
    dear = Decision(missed_cost=(cost * factor,))
    assert decide_level(probabilities, dear) <= decide_level(probabilities, cheap)


@pytest.mark.parametrize("decision", [SYMMETRIC, LEAST_COST, BOUNDED])
def test_certain_prediction_gives_its_level(decision):
    for level in range(5):
        assert decide_level([float(other == level) for other in range(5)], decision) == level


def test_equal_costs_give_median_and_high_ones_urgency():
    torn = (0.3, 0.15, 0.05, 0.1, 0.4)
    assert decide_level(torn, SYMMETRIC) == 2
    assert decide_level(torn, LEAST_COST) == 0


@given(distributions(5), st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4))
def test_most_urgent_level_that_reaches_its_bound_counts(probabilities, bounds):
    level = decide_level(probabilities, Decision(tuple(bounds)))
    together = [sum(probabilities[: other + 1]) for other in range(5)]
    assert all(together[other] < bounds[other] for other in range(level))
    assert level == 4 or together[level] >= bounds[level] - 2e-6


@given(distributions(5), distributions(5), st.floats(0, 1))
def test_more_probability_of_urgent_levels_never_makes_a_request_less_urgent(row, other, share):
    """Moved from a level to a more urgent one."""
    moved = list(row)
    given_away = share * moved[3]
    moved[3] -= given_away
    moved[1] += given_away
    assert decide_level(moved, BOUNDED) <= decide_level(row, BOUNDED)


@given(distributions(5), st.integers(0, 3), st.floats(0.01, 0.99))
def test_a_lower_bound_never_makes_a_request_less_urgent(probabilities, place, factor):
    bounds = list(BOUNDED.bounds)
    bounds[place] *= factor
    lower = Decision(tuple(bounds))
    assert decide_level(probabilities, lower) <= decide_level(probabilities, BOUNDED)


def test_equality_reaches_a_bound():
    assert decide_level((0.1, 0.2, 0.1, 0.6, 0.0), Decision((0.2, 0.3, 0.5, 0.5))) == 1


@given(distributions(), st.floats(0.5, 20.0))
def test_predictions_of_other_levels_than_the_bounds_are_decided_by_cost(probabilities, cost):
    costs = MissedCosts(missed_cost=(cost,))
    expected = decide_level(probabilities, LEAST_COST, costs)
    if len(probabilities) != 5:
        assert decide_level(probabilities, BOUNDED, costs) == expected
    else:
        assert decide_level(probabilities, BOUNDED, costs) == decide_level(probabilities, BOUNDED)


@pytest.mark.parametrize("bounds", [[0.0, 0.5], [1.1], [float("nan")], ["much"], 0.5])
def test_bounds_are_shares(bounds):
    with pytest.raises(ValueError, match="bounds"):
        decision_of({"decision": {"bounds": bounds}})


def test_settings_that_a_decision_does_not_have_are_named():
    with pytest.raises(ValueError, match="valid keys: bounds, missed_cost"):
        decision_of({"decision": {"rule": "thresholds"}})


def test_last_missed_cost_holds_for_all_further_levels():
    assert expected_costs((0.0, 0.0, 1.0, 0.0), Decision(missed_cost=(9.0, 3.0)))[3] == 3.0
