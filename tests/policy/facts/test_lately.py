"""Decaying sums and the sliding window."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.facts.lately import Decayed, SlidingWindow

events = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 5.0)), max_size=40)


@given(events)
def test_a_part_counts_less_the_older_it_is(events) -> None:
    decayed, now, parts = Decayed(2), 0.0, []
    for passed, amount in events:
        now += passed
        decayed.age(passed, constant=7.0)
        decayed.add(1, amount)
        parts.append((now, amount))
    expected = sum(amount * math.exp((at - now) / 7.0) for at, amount in parts)
    assert decayed.sums == pytest.approx([0.0, expected])


def test_a_refund_leaves_no_debt() -> None:
    decayed = Decayed(1)
    decayed.add(0, 2.0)
    decayed.add(0, -3.0)
    assert decayed.sums == [0.0]


@given(events)
def test_window_has_what_came_within_it_and_no_more(events) -> None:
    window, now, times = SlidingWindow(60.0, 12, list), 0.0, []
    for passed, _ in events:
        now += passed
        window.advance(now)
        record, _ = window.newest(now)
        record.append(now)
        times.append(now)
        kept = [time for record in window for time in record]
        assert kept == times[len(times) - len(kept) :]
        assert all(time in kept for time in times if time > now - 55.0 + 1e-6)
        assert all(time > now - 60.0 - 1e-6 for time in kept)


def test_window_survives_a_clock_that_steps_back() -> None:
    window = SlidingWindow(60.0, 12, list)
    first, is_new = window.newest(100.0)
    assert is_new and window.newest(10.0) == (first, False)
    assert window.advance(10.0) == [] and window.advance(200.0) == [[]]
    assert not [*window]
