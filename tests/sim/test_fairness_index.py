"""Jain's index over tenants."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.sim.metrics import TenantService, jain_index


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_jain_index_depends_on_ratios_and_is_one_if_equal(values, scale) -> None:
    index = jain_index(values)
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9
    assert jain_index([scale * value for value in values]) == pytest.approx(index)
    assert jain_index([scale] * len(values)) == pytest.approx(1)
    assert jain_index([scale] + [0.0] * 4) == pytest.approx(0.2)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20)), min_size=1, max_size=20))
def test_time_with_requests_is_that_of_the_union(requests) -> None:
    service = TenantService()
    ends = sorted((arrival + seconds, arrival) for arrival, seconds in requests)
    for finish, arrival in ends:
        service.add("a", arrival, finish, tokens=1)
    moments = sorted({moment for pair in ends for moment in pair})
    active = sum(
        later - earlier
        for earlier, later in itertools.pairwise(moments)
        if any(arrival <= earlier and later <= finish for finish, arrival in ends)
    )
    assert service.fairness() is None
    service.add("b", 0.0, active, tokens=len(requests))  # the same tokens in the same time
    assert service.fairness() == pytest.approx(1)
