"""The level that a predicted distribution stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.estimates.decision import Decision, decide_level, expected_cost

LIKELIEST = Decision(rule="most_likely")
SYMMETRIC = Decision(missed_cost=(1.0,))


@st.composite
def distributions(draw):
    weights = draw(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7))
    return tuple(weight / sum(weights) for weight in weights)


@given(distributions(), st.lists(st.floats(0.1, 50.0), min_size=1, max_size=5))
def test_no_level_costs_less_than_the_one_decided(probabilities, costs):
    decision = Decision(missed_cost=tuple(costs))
    decided = expected_cost(probabilities, decide_level(probabilities, decision), decision)
    for level in range(len(probabilities)):
        assert decided <= expected_cost(probabilities, level, decision)


@given(distributions(), st.floats(1.0, 20.0), st.floats(1.0, 5.0))
def test_a_dearer_miss_never_makes_a_request_less_urgent(probabilities, cost, factor):
    cheap, dear = Decision(missed_cost=(cost,)), Decision(missed_cost=(cost * factor,))
    assert decide_level(probabilities, dear) <= decide_level(probabilities, cheap)


@pytest.mark.parametrize("decision", [LIKELIEST, SYMMETRIC, Decision()])
def test_certainty_is_believed(decision):
    for level in range(5):
        assert decide_level([float(other == level) for other in range(5)], decision) == level


def test_equal_mistakes_give_the_median_and_dear_misses_the_urgent_side():
    torn = (0.3, 0.15, 0.05, 0.1, 0.4)
    assert decide_level(torn, LIKELIEST) == 4
    assert decide_level(torn, SYMMETRIC) == 2
    assert decide_level(torn, Decision()) == 0


def test_a_further_level_costs_what_the_last_one_named_costs():
    assert expected_cost((0.0, 0.0, 1.0, 0.0), 3, Decision(missed_cost=(9.0, 3.0))) == 3.0
