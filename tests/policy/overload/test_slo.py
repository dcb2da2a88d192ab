"""Rolling percentiles, compliance and headroom."""

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import policy_ref

from vllm_semantic_sched.policy.config.tiers import Slo, Tier
from vllm_semantic_sched.policy.overload.slo import RollingValues, SloMonitor

VALUES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200)


@given(VALUES, st.floats(1, 100))
def test_percentiles_are_within_two_percent(values, percent) -> None:
    rolling = RollingValues(window=600)
    for place, value in enumerate(values):
        rolling.add(value, True, now=float(place))  # over several slots
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert rolling.percentile(percent) == pytest.approx(exact, rel=0.0201)


def test_percentiles_follow_new_values_and_slots() -> None:
    rolling = RollingValues(window=12)
    for now, value, expected in ((0, 1.0, 1.0), (0, 3.0, 3.0), (5, 9.0, 9.0), (5, 30.0, 30.0)):
        rolling.add(value, True, float(now))
        assert rolling.percentile(100) == pytest.approx(expected, rel=0.0201)
    rolling.advance(16.5)
    assert rolling.percentile(1) == pytest.approx(9.0, rel=0.0201)


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans()), max_size=60))
def test_window_holds_only_the_last_seconds(steps) -> None:
    rolling, now, added = RollingValues(window=12), 100.0, []
    for pause, met in steps:
        now += pause
        rolling.add(1.0, met, now)
        added.append((now, met))
    rolling.advance(now)
    sure = [met for time, met in added if time > now - 11]
    at_most = [met for time, met in added if time > now - 12]
    assert len(sure) <= rolling.count <= len(at_most)
    assert sum(sure) <= rolling.met <= sum(at_most)
    rolling.advance(now + 12)
    assert rolling.count == rolling.met == 0 and rolling.percentile(50) is None


def test_memory_is_bounded() -> None:
    def kilobytes(values: int) -> float:
        tracemalloc.start()
        rolling = RollingValues(window=60)
        for number in range(values):
            rolling.add(1.001**number % 1e9, True, now=number * 60 / 4096)
        rolling.percentile(50)
        peak = tracemalloc.get_traced_memory()[0] / 1024
        tracemalloc.stop()
        return peak

    full = kilobytes(4096)  # one window
    assert kilobytes(4 * 4096) < 1.5 * full < 1500


def test_extreme_values_and_a_clock_stepping_back_are_handled() -> None:
    rolling = RollingValues(window=60)
    for value, now in ((0.0, 100.0), (-1.0, 50.0), (1e12, 100.0)):
        rolling.add(value, False, now)
    assert rolling.count == 3 and rolling.percentile(100) is not None


TIERS = (
    Tier(name="premium", slo=Slo(ttft=1.0, e2e=10.0, percentile=90.0)),
    Tier(name="background"),
)


def test_compliance_is_the_lowest_over_the_slos() -> None:
    monitor = SloMonitor(policy_ref(TIERS), window=60)
    assert monitor.compliance(0) is None and monitor.meets_slo(0) is None
    for ttft in (0.5,) * 9 + (2.0,):
        monitor.record(0, ttft=ttft, now=1.0)
    monitor.record(0, e2e=9.0, now=1.0)
    assert monitor.compliance(0) == pytest.approx(0.9)
    assert monitor.meets_slo(0) is True
    monitor.record(0, ttft=2.0, now=2.0)
    assert monitor.meets_slo(0) is False
    assert monitor.meets_slo(0, enough=100) is None
    monitor.advance(100.0)
    assert monitor.compliance(0) is None


def test_headroom_is_the_smallest_over_the_slos() -> None:
    monitor = SloMonitor(policy_ref(TIERS), window=60)
    monitor.record(0, ttft=0.5, e2e=2.0, now=1.0)
    assert monitor.headroom(0) == pytest.approx(0.5, abs=0.03)
    monitor.record(0, ttft=3.0, now=1.0)
    assert monitor.headroom(0) == pytest.approx(-2.0, abs=0.2)


def test_tier_without_slos_has_no_compliance_and_no_headroom() -> None:
    monitor = SloMonitor(policy_ref(TIERS), window=60)
    monitor.record(1, ttft=100.0, tpot=1.0, e2e=1000.0, now=1.0)
    assert monitor.compliance(1) is None and monitor.headroom(1) is None
    assert monitor.values[1]["ttft"].percentile(99) == pytest.approx(100.0, rel=0.051)
