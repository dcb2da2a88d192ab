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


def test_first_step_lasts_from_the_begin_of_schedule(clock) -> None:
    step, batch = output(a=1), Batch(decodes=1)
    clock.scheduled(step, batch, 10.0)
    assert clock.finished(step, 10.5) == (batch, 0.5)
    assert clock.finished(step, 11.0) is None  # once only


def test_busy_engine_counts_what_the_host_does_between_steps(clock) -> None:
    first, second = output(a=1), output(a=1)
    clock.scheduled(first, Batch(), 10.0)
    clock.finished(first, 10.5)
    clock.scheduled(second, Batch(), 10.6)
    assert clock.finished(second, 11.0)[1] == pytest.approx(0.5)


def test_idle_time_is_in_no_step(clock) -> None:
    first, second, third = output(a=1), output(b=1), output(b=1)
    clock.scheduled(first, Batch(), 10.0)
    clock.finished(first, 10.5)
    clock.idle()
    clock.scheduled(second, Batch(), 20.0)
    assert clock.finished(second, 20.5)[1] == pytest.approx(0.5)
    clock.scheduled(third, Batch(), 20.6)
    assert clock.finished(third, 21.0)[1] == pytest.approx(0.5)


def test_step_in_flight_lasts_from_previous_output(clock) -> None:
    first, second, third, fourth = (output(a=1) for _ in range(4))
    clock.scheduled(first, Batch(), 0.0)
    clock.scheduled(second, Batch(), 0.1)
    assert clock.finished(first, 1.0) == (Batch(), 1.0)
    clock.scheduled(third, Batch(), 1.1)
    assert clock.finished(second, 1.8)[1] == pytest.approx(0.8)
    # All requests end while one more step is in flight; then the engine is idle.
    clock.idle()
    assert clock.finished(third, 2.5)[1] == pytest.approx(0.7)
    clock.idle()
    clock.scheduled(fourth, Batch(), 4.0)
    assert clock.finished(fourth, 4.5)[1] == pytest.approx(0.5)


def test_sampled_step_has_its_own_time_with_two_in_flight() -> None:
    from vllm_semantic_sched.engine.clock import StepSamples

    samples, first, second = StepSamples(), output(a=1), output(a=1)
    samples.scheduled(first, 0.0, lambda: Batch(decodes=1))
    samples.scheduled(second, 0.1, lambda: Batch(decodes=2))
    samples.finished(first, 1.0)
    samples.scheduled(output(a=1), 1.0, lambda: Batch(decodes=3))
    samples.finished(second, 3.0)
    assert [(row[0], row[-1]) for row in samples.drain()] == [(1, 1_000_000), (2, 2_000_000)]


def test_steps_without_output_do_not_accumulate(clock) -> None:
    lost = [output(a=1) for _ in range(1000)]
    for step in lost:
        clock.scheduled(step, Batch(), 0.0)
    assert len(clock._in_flight) < 100


def test_batch_is_read_from_the_scheduler_output() -> None:
    from vllm_semantic_sched.engine.clock import batch_of

    computed = {"a": 101, "b": 51, "c": 300, "d": 20, "held": 5000}
    requests: Any = {key: SimpleNamespace(num_computed_tokens=n) for key, n in computed.items()}
    step = output(a=1, b=1, c=200, d=20)
    expected = Batch(decodes=2, context=152)
    expected.add_prefill(100, 300)
    expected.add_prefill(0, 20)
    assert batch_of(step, requests, list(requests.values())) == expected
    without_held = [requests[name] for name in "dcba"]
    assert batch_of(step, requests, without_held) == expected
    drafted = batch_of(output(a=4, b=1), requests, list(requests.values()), draft_tokens=3)
    assert drafted == Batch(decodes=2, context=152)


def test_scheduler_times_idle_and_paused_engines_from_schedule(tmp_path, monkeypatch) -> None:
    from vllm.v1.core.sched.interface import PauseState

    from vllm_semantic_sched import SemanticScheduler
    from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step

    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\n")
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    seen: list[Any] = []
    observe = scheduler.core.estimates.observe_step
    monkeypatch.setattr(
        scheduler.core.estimates, "observe_step", lambda *step: (seen.append(step), observe(*step))
    )
    clock = scheduler.step_clock
    for number in range(2):
        scheduler.add_request(make_request(f"r{number}", output_tokens=3))
        run_step(scheduler)
        clock._last_output -= 1000.0  # as if the output had come long ago
        run_step(scheduler)
        assert seen[-1][1] > 1000.0
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        clock._last_output -= 1000.0
        scheduler.set_pause_state(PauseState.UNPAUSED)
        run_step(scheduler)
        assert seen[-1][1] < 1000.0
        assert not scheduler.requests
        clock._last_output -= 1000.0
    assert [batch.sequences for batch, _ in seen] == [1] * 6
    assert [seconds < 1000.0 for _, seconds in seen] == [True, False, True] * 2
    assert scheduler.counters.total("policy_errors") == 0
