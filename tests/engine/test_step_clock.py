"""Measured step times, also with several steps in flight."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_semantic_sched.policy.profile.formula import Batch

pytestmark = pytest.mark.engine


@pytest.fixture
def clock() -> Any:
    from vllm_semantic_sched.engine.clock import StepClock

    return StepClock()


def output(**scheduled: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values())
    )


def test_step_lasts_from_schedule_to_its_output(clock) -> None:
    step, batch = output(a=1), Batch(decodes=1)
    clock.scheduled(step, batch, 10.0)
    assert clock.finished(step, 10.5) == (batch, 0.5)
    assert clock.finished(step, 11.0) is None  # once only


def test_with_two_steps_in_flight_a_step_lasts_from_the_previous_output(clock) -> None:
    first, second, third = output(a=1), output(a=1), output(a=1)
    clock.scheduled(first, Batch(), 0.0)
    clock.scheduled(second, Batch(), 0.1)
    assert clock.finished(first, 1.0) == (Batch(), 1.0)
    clock.scheduled(third, Batch(), 1.1)
    assert clock.finished(second, 1.8)[1] == pytest.approx(0.8)
    # The engine was idle before this one.
    assert clock.finished(third, 2.5)[1] == pytest.approx(0.7)


def test_steps_without_output_do_not_accumulate(clock) -> None:
    lost = [output(a=1) for _ in range(1000)]
    for step in lost:
        clock.scheduled(step, Batch(), 0.0)
    assert len(clock._in_flight) < 100


def test_batch_is_read_from_the_scheduler_output() -> None:
    from vllm_semantic_sched.engine.clock import batch_of

    computed = {"a": 101, "b": 51, "c": 300, "d": 20}
    requests: Any = {key: SimpleNamespace(num_computed_tokens=n) for key, n in computed.items()}
    step = output(a=1, b=1, c=200, d=20)
    expected = Batch(decodes=2, context=152)
    expected.add_prefill(100, 300)
    expected.add_prefill(0, 20)
    assert batch_of(step, requests) == expected
    assert batch_of(step, requests, context=77).context == 77
    drafted = batch_of(output(a=4, b=1), requests, draft_tokens=3)
    assert drafted == Batch(decodes=2, context=152)
