"""The choice of an engine among several."""

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.placement import CACHE_WORTH, EngineReport, Placement

LEVELS = 3

# A request of that level arrives, or the n-th of those in flight finishes.
EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrival"]), st.integers(0, LEVELS - 1))
    | st.tuples(st.sampled_from(["finish"]), st.integers(0, 50)),
    max_size=80,
)


class Checked:
    """A placement beside a plain list of what is in flight where."""

    def __init__(self, engines: int) -> None:
        self.placement = Placement(engines, LEVELS)
        self.engines = engines
        self.in_flight = []

    def ahead(self, engine: int, level: int) -> int:
        """Requests at an engine that are at least as urgent."""
        return sum(one.engine == engine and one.level <= level for one in self.in_flight)

    def run(self, event) -> None:
        kind, level = event
        if kind == "finish":
            if self.in_flight:
                self.placement.leave(self.in_flight.pop(level % len(self.in_flight)))
            return
        before = [self.ahead(engine, level) for engine in range(self.engines)]
        totals = [self.ahead(engine, LEVELS - 1) for engine in range(self.engines)]
        placed = self.placement.place(level)
        assert before[placed.engine] == min(before)
        tied = [engine for engine in range(self.engines) if before[engine] == min(before)]
        assert totals[placed.engine] == min(totals[engine] for engine in tied)
        self.in_flight.append(placed)


@given(st.integers(1, 6), EVENTS)
def test_no_engine_has_less_work_at_least_as_urgent(engines, events) -> None:
    checked = Checked(engines)
    for event in events:
        checked.run(event)
    for engine in range(engines):
        assert checked.placement.ahead[-1][engine] == checked.ahead(engine, LEVELS - 1)
    for placed in checked.in_flight:
        checked.placement.leave(placed)
    assert all(checked.placement.ahead[-1][engine] == 0 for engine in range(engines))


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, LEVELS - 1))
def test_ties_go_in_turn(engines, rounds, level) -> None:
    placement = Placement(engines, LEVELS)
    for turn in range(rounds * engines):
        placed = placement.place(level)
        assert placed.engine == turn % engines
        placement.leave(placed)


@given(st.integers(1, 6), st.lists(st.integers(0, LEVELS - 1), max_size=60))
def test_requests_of_each_level_spread_evenly(engines, levels) -> None:
    placement = Placement(engines, LEVELS)
    counts = Counter(placement.place(level).engine for level in levels if level == 0)
    assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1


BY_LEVEL = st.tuples(*[st.integers(0, 9)] * LEVELS)
TABLES = st.lists(BY_LEVEL, min_size=1, max_size=6)


def placement_of(tables) -> Placement:
    """Engines with that many requests of each level."""
    placement = Placement(len(tables), LEVELS)
    for engine, by_level in enumerate(tables):
        for level, requests in enumerate(by_level):
            for _ in range(requests):
                placement.count(engine, level)
    return placement


@given(TABLES, st.integers(0, 6), st.integers(0, LEVELS - 1))
def test_session_stays_unless_more_wait_there_than_its_cache_is_worth(tables, home, level) -> None:
    chosen = placement_of(tables).place(level, home=home).engine
    ahead = [sum(by_level[: level + 1]) for by_level in tables]
    if home < len(tables) and ahead[home] - min(ahead) <= CACHE_WORTH:
        assert chosen == home
    else:
        assert chosen == placement_of(tables).place(level).engine


def test_home_outside_the_engines_to_choose_from_does_not_count() -> None:
    placement = Placement(3, LEVELS)
    assert placement.place(0, among=range(1, 3), home=0).engine == 1
    assert placement.place(0, among=range(2), home=1).engine == 1


WORKS = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(WORKS, st.integers(0, LEVELS - 1))
def test_without_levels_the_least_loaded_engine_is_chosen(works, level) -> None:
    placement = Placement(len(works), LEVELS)
    for engine, work in enumerate(works):
        placement.report(engine, EngineReport(0.0, work))
    assert works[placement.place(level).engine] == min(works)


@given(TABLES, st.integers(0, LEVELS - 1))
def test_levels_of_an_old_report_do_not_count(tables, level) -> None:
    placement = Placement(len(tables), LEVELS)
    for engine, by_level in enumerate(tables):
        placement.report(engine, EngineReport(0.0, sum(by_level), by_level))
    placement.expire(1.0)  # not old yet
    placed = placement.place(level)
    ahead = [sum(by_level[: level + 1]) for by_level in tables]
    assert ahead[placed.engine] == min(ahead)
    placement.leave(placed)
    placement.expire(60.0)
    totals = [sum(by_level) for by_level in tables]
    assert totals[placement.place(level).engine] == min(totals)


@given(st.lists(st.integers(0, LEVELS - 1), max_size=30), BY_LEVEL)
def test_reported_requests_are_not_counted_twice(levels, by_level) -> None:
    placement = Placement(1, LEVELS)
    placed = [placement.place(level) for level in levels]
    reported = EngineReport(0.0, sum(by_level), by_level)
    for _ in range(2):
        placement.report(0, reported)
        assert placement.ahead[-1][0] == max(len(placed), sum(by_level))
    for one in placed:
        placement.leave(one)
    placement.report(0, EngineReport(1.0, 0, (0,) * LEVELS))
    assert placement.ahead[-1][0] == 0


def test_requests_placed_since_the_report_count() -> None:
    placement = Placement(2, LEVELS)
    for engine in (0, 1):
        placement.report(engine, EngineReport(0.0, 8, (4, 2, 2)))
    assert [placement.place(0).engine for _ in range(4)] == [0, 1, 0, 1]


def test_free_kv_breaks_ties_only() -> None:
    placement = Placement(3, LEVELS)
    for engine, free in enumerate((0.1, 0.9, 0.5)):
        placement.report(engine, EngineReport(0.0, 0, kv_free=free))
    assert [placement.place(0).engine for _ in range(3)] == [1, 2, 0]


def test_less_urgent_work_does_not_count() -> None:
    placement = Placement(2, LEVELS)
    for _ in range(10):
        placement.count(0, 2)
    placement.count(1, 0)
    assert placement.place(0).engine == 0
    assert placement.place(2).engine == 1


def test_report_with_other_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="valid: 3"):
        Placement(2, LEVELS).report(0, EngineReport(0.0, 1, (1,)))


def test_choice_is_fast_with_many_engines_and_requests() -> None:
    """Counted in the interpreter's instructions, which no busy machine changes."""

    def instructions(engines: int, requests: int) -> int:
        placement = Placement(engines, 5)
        in_flight = [placement.place(index % 5) for index in range(requests)]
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for index in range(200):
                placement.leave(in_flight[index])
                in_flight[index] = placement.place(index % 5)
        finally:
            sys.settrace(before)
        return count // 200

    instructions(1, 200)  # Python 3.12 counts none the first time that a program traces them
    few, many = instructions(64, 200), instructions(64, 10_000)
    assert many < 1.2 * few
    # 33 for each engine: 20 microseconds in all.
    assert 0 < many < 64 * 100
