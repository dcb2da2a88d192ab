"""The fewest requests to give up so that the others keep their deadlines."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.overload.deadline import Claim, not_kept


def all_in_time(claims, free_at: float, token_seconds: float) -> bool:
    start = free_at
    for claim in sorted(claims, key=lambda claim: claim.start_by):
        if start > claim.start_by:
            return False
        start += claim.tokens * token_seconds
    return True


def claim(number: int, tokens: float, start_by: float) -> Claim:
    return Claim(tokens, start_by, f"job {number}")


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), max_size=7), st.integers(0, 5))
def test_the_kept_ones_start_in_time(rows, free_at) -> None:
    claims = [claim(number, *row) for number, row in enumerate(rows)]
    given_up = not_kept(claims, free_at, 1.0)
    kept = [one for one in claims if one not in given_up]
    assert all_in_time(kept, free_at, 1.0)
    if all_in_time(claims, free_at, 1.0):
        assert not given_up


def test_the_longest_is_given_up_first() -> None:
    claims = [claim(0, 50, 10.0), claim(1, 5, 20.0), claim(2, 5, 30.0)]
    assert [one.job for one in not_kept(claims, 0.0, 1.0)] == ["job 0"]
