"""Pressure: rises at once, falls with hysteresis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.overload.load import CALM, PressureLevel, PressureMonitor, Use

# KV: warning 0.9, critical 1.2; margin 0.1; calm for 2 s
NONE, WARNING, CRITICAL = PressureLevel


def after(*observations: tuple[float, float]) -> PressureLevel:
    """Level after observations (time, use of KV)."""
    monitor = PressureMonitor()
    for now, kv in observations:
        monitor.observe(Use(kv=kv), now)
    return monitor.level


@pytest.mark.parametrize(
    ("use", "level"),
    [
        (Use(kv=0.89, seats=1.4, queue=0.49, step=0.79), NONE),
        (Use(kv=0.9), WARNING),
        (Use(seats=1.5), WARNING),
        (Use(queue=0.5), WARNING),
        (Use(step=0.8), WARNING),
        (Use(kv=1.2), CRITICAL),
        (Use(kv=0.9, queue=0.9), CRITICAL),
    ],
)
def test_the_scarcest_resource_decides(use, level) -> None:
    assert PressureMonitor().observe(use, 0.0) is level


def test_pressure_falls_only_after_staying_below_the_margin() -> None:
    assert after((0, 1.3), (1, 0.0), (2.9, 0.0)) is CRITICAL
    assert after((0, 1.3), (1, 0.0), (3.0, 0.0)) is NONE
    assert after((0, 1.3), (1, 1.1), (9, 1.1)) is CRITICAL  # not below 1.2 less a tenth
    assert after((0, 1.3), (1, 1.0), (3, 1.0)) is WARNING
    assert after((0, 1.3), (1, 0.0), (2, 1.15), (3.5, 0.0)) is CRITICAL  # begins anew


@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.85, 0.95, 1.1, 1.3])), max_size=80)
)
def test_pressure_never_falls_within_hold_of_a_rise(steps) -> None:
    monitor, now, risen = PressureMonitor(), 0.0, float("-inf")
    for pause, kv in steps:
        now += pause
        before = monitor.level
        level = monitor.observe(Use(kv=kv), now)
        assert level >= (CRITICAL if kv >= 1.2 else WARNING if kv >= 0.9 else NONE)
        if level > before:
            risen = now
        elif level < before:
            assert now - risen >= CALM
