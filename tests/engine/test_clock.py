"""The clock of the scheduler, which stops during pauses."""

import re
from pathlib import Path

import pytest
from vllm.v1.core.sched.interface import PauseState

import vllm_semantic_sched
from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.clock import (
    ServiceClock,
    monotonic,
    replace_clock,
    unix_time,
)
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step

pytestmark = pytest.mark.engine


class Seconds:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_are_not_counted() -> None:
    seconds = Seconds()
    clock = ServiceClock(seconds)
    for served, paused in ((5, 60), (3, 0), (0, 600)):
        before = clock()
        seconds.now += served
        clock.pause()
        seconds.now += paused / 2
        clock.pause()
        assert clock() == before + served
        seconds.now += paused / 2
        clock.resume()
        clock.resume()
        assert clock() == before + served
        seconds.now += 1
        assert clock() == before + served + 1


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_pausing_vllm_stops_the_clock(tmp_path, state) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\n")
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    scheduler.set_pause_state(state)
    assert scheduler.clock() == scheduler.clock()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.clock() < scheduler.clock()


def test_no_decision_reads_the_time_of_day() -> None:
    """It can jump, unlike the monotonic clock. Only what is written down uses it: the event log
    with the arrivals in it, and corrections."""
    package = Path(vllm_semantic_sched.__file__).parent
    for folder in ("policy", "engine", "predict"):
        for path in package.joinpath(folder).rglob("*.py"):
            if path.name in ("event_log.py", "arrivals.py", "admin.py"):
                continue
            code = path.read_text("utf-8")
            code = code.replace("def unix_time(", "").replace("return time.time() if", "")
            assert not re.search(r"\btime\.time\(|datetime\.now|utcnow", code), path.name
            assert "unix_time(" not in code, path.name


def test_replaced_clock_counts_for_scheduler(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\n")
    replace_clock(lambda: 7.5)
    try:
        scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
        scheduler.add_request(make_request("a"))
        run_step(scheduler)
        assert scheduler.clock() == monotonic() == 7.5
        assert scheduler.jobs["a"].arrival == scheduler.jobs["a"].started == 7.5
        assert scheduler.jobs["a"].source.came == unix_time()
    finally:
        replace_clock(None)
    assert monotonic() != 7.5


def test_no_queue_timeout_expires_during_a_pause(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\nadmission: {queue: {timeout: 10}}\n")
    scheduler = build_scheduler(
        SemanticScheduler, semantic_sched={"policy": str(path)}, max_num_seqs=1
    )
    scheduler.clock.seconds = seconds = Seconds()
    for name in "ab":
        scheduler.add_request(make_request(name, output_tokens=100))
    run_step(scheduler)
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    seconds.now += 3600
    scheduler.add_request(make_request("c", output_tokens=100))
    seconds.now += 3600
    scheduler.set_pause_state(PauseState.UNPAUSED)
    run_step(scheduler)
    assert set(scheduler.requests) == {"a", "b", "c"}
    seconds.now += 11
    run_step(scheduler)
    assert set(scheduler.requests) == {"a"}
    assert scheduler.counters.total("policy_errors") == 0
