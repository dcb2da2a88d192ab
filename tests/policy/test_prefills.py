"""Who gets the prompt tokens of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, seated

from vllm_semantic_sched.policy.prefills import Prefill, gates_prefills, share


def prefill(level: int, tokens: int, may_sit_out: bool = True) -> Prefill:
    return Prefill(seated(make_job(level, prompt_tokens=tokens)), tokens, may_sit_out)


def newcomer(level: int, tokens: int) -> Prefill:
    return Prefill(make_job(level, prompt_tokens=tokens), tokens, True)


def served(prefills: list[Prefill], budget: int) -> list[int]:
    """The tokens of each, as vLLM gives them: in order, up to the cap, while the budget lasts."""
    limits, tokens = share(prefills, budget), []
    for one in prefills:
        most = 0 if one.job in limits.held else min(one.tokens, limits.cap or one.tokens, budget)
        tokens.append(most)
        budget -= most
    return tokens


@pytest.mark.parametrize(
    ("decoding", "prefill_level", "gated"),
    [(0, 3, True), (0, 0, False), (1, 0, False), (1, 3, False)],
)
def test_gate_keeps_less_urgent_prefills_from_a_protected_decode(
    decoding, prefill_level, gated
) -> None:
    assert gates_prefills(decoding, prefill_level, gated_level=0) == gated


def test_all_prefills_that_fit_go_on() -> None:
    assert served([prefill(0, 100), prefill(3, 50)], 150) == [100, 50]


def test_long_prompt_gets_what_the_decodes_leave() -> None:
    assert served([prefill(0, 8000)], 480) == [480]


def test_less_urgent_prefill_gets_the_rest_of_the_step() -> None:
    assert served([prefill(0, 200), prefill(4, 4000)], 2048) == [200, 1848]


def test_prefill_sits_out_if_it_would_cut_a_more_urgent_one() -> None:
    assert served([prefill(0, 1500), prefill(4, 4000)], 2048) == [1500, 0]


def test_prefill_that_has_sat_out_long_enough_shares_the_step() -> None:
    assert served([prefill(0, 1500), prefill(4, 4000, may_sit_out=False)], 2048) == [1024, 1024]


def test_newcomer_takes_nothing_from_a_more_urgent_prefill() -> None:
    limits = share([prefill(0, 4000), newcomer(1, 500), prefill(4, 3000)], 2000)
    assert limits.cap == 2000 and [job.level for job in limits.held] == [4]


def test_equally_urgent_prefills_share_a_step_that_is_too_small() -> None:
    assert served([prefill(2, 1500), prefill(2, 4000)], 2048) == [1024, 1024]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 5000), st.booleans()), min_size=1, max_size=8
    ),
    st.integers(0, 4096),
)
def test_decodes_keep_their_tokens_and_the_most_urgent_advances(rows, budget) -> None:
    prefills = [prefill(*row) for row in sorted(rows, key=lambda row: row[0])]
    limits = share(prefills, budget)
    wanted = [
        min(one.tokens, limits.cap or one.tokens) for one in prefills if one.job not in limits.held
    ]
    # One token each is the least that can be asked of vLLM.
    assert sum(wanted) <= max(budget, len(wanted))
    if budget:
        assert prefills[0].job not in limits.held
    assert all(one.may_sit_out for one in prefills if one.job in limits.held)
