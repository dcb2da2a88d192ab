"""Capacity planning: searches for the largest load and the fewest engines."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.sim.plan import Trial, fewest_engines, largest_load


@given(st.floats(0.02, 60.0))
def test_largest_load_is_found_within_three_percent(limit: float) -> None:
    found = largest_load(lambda load: Trial(load, 1, load <= limit, {}))
    assert found is not None and found.holds
    assert limit / 1.031 <= found.load <= limit


@given(st.integers(1, 64))
def test_fewest_engines_are_found_exactly(needed: int) -> None:
    found = fewest_engines(lambda count: Trial(1.0, count, count >= needed, {}))
    assert found is not None and found.engines == needed


def test_search_returns_none_if_nothing_holds() -> None:
    assert largest_load(lambda load: Trial(load, 1, False, {})) is None
    assert fewest_engines(lambda count: Trial(1.0, count, False, {})) is None
