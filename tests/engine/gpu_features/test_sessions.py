"""Sessions whose input comes turn by turn (vLLM's realtime API): idle ones between two turns keep
their seat and KV."""

import pytest
from engine_steps import EngineSteps, calls_in

from vllm_semantic_sched.policy.facts.wait import Cause
from vllm_semantic_sched.policy.step import _why_waiting

pytestmark = pytest.mark.engine

AT_ONCE = 3
PROTECT = "protect: {level: 0, price: 0.9, worth: 100000}\n"


def idle_sessions(scheduler, count: int, **fields) -> EngineSteps:
    """An engine with idle sessions of level 2, which have answered one turn."""
    steps = EngineSteps(scheduler)
    names = [f"session{number}" for number in range(count)]
    steps.add(*names, urgency=2, output_tokens=1, resumable=True, **fields)
    steps.run(3)
    assert scheduler.num_waiting_for_streaming_input == count
    return steps


# Each takes one seat


def test_wait_cause_is_not_seat_while_one_is_free(build) -> None:
    scheduler = build(max_num_seqs=8)
    steps = idle_sessions(scheduler, 4)
    steps.add("waiting", urgency=2)
    assert _why_waiting(scheduler.core, scheduler.snapshot()) is not Cause.SEAT


def test_nobody_is_held_while_a_seat_is_free(build) -> None:
    steps = idle_sessions(build(PROTECT, max_num_seqs=8), 4)
    steps.add("urgent", urgency=0, output_tokens=200)
    steps.add("low", urgency=4, output_tokens=200)
    steps.run(2)
    steps.add("next", urgency=4, output_tokens=5)
    assert steps.run().keys() == {"urgent", "low", "next"}


def test_step_beside_idle_sessions_costs_about_as_with_vllm(build, build_stock) -> None:
    def calls(build, sessions: int) -> int:
        steps = idle_sessions(build(max_num_seqs=64), sessions)
        steps.add("decode", urgency=2, output_tokens=500)
        steps.run(5)
        return calls_in(steps.run)

    assert calls(build, 32) <= calls(build_stock, 32) + 2 * calls(build, 0)


# KV of idle sessions, and of preempted ones


def test_idle_session_gives_way_to_an_urgent_request(build) -> None:
    """Two hold 58 of 60 blocks."""
    scheduler = build(max_num_seqs=8, num_blocks=61)
    steps = idle_sessions(scheduler, 2, prompt_tokens=200)
    sessions = ["session0", "session1"]
    turn = {"urgency": 2, "output_tokens": 1, "resumable": True}
    for _ in range(2):
        steps.add(*sessions, prompt_tokens=130, **turn)
        steps.run(3)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 2
    steps.add("urgent", urgency=0, prompt_tokens=200, output_tokens=5)
    assert steps.until_scheduled("urgent", 50) in range(AT_ONCE + 1)
    while "urgent" in scheduler.requests:
        steps.run()
    begin = steps.count
    steps.add(*sessions, prompt_tokens=10, **turn)
    steps.run(20)
    for name in sessions:  # both turns are answered
        assert any(name in tokens for tokens in steps.scheduled[begin:]), name
    assert scheduler.num_waiting_for_streaming_input == 2


def test_session_preempted_in_flight_answers_next_turn(build) -> None:
    scheduler = build(max_num_seqs=2, async_scheduling=True)
    steps = EngineSteps(scheduler)
    turn = {"urgency": 4, "output_tokens": 2, "resumable": True}
    steps.add("session", **turn)
    steps.add("other", urgency=3, output_tokens=60)
    steps.run(2)
    steps.add("urgent", urgency=0, output_tokens=30)
    assert steps.until_scheduled("urgent", 10) in range(AT_ONCE + 1)
    steps.run(3)
    begin = steps.count
    steps.add("session", **turn)
    steps.run(100)
    assert sum("session" in tokens for tokens in steps.scheduled[begin:]) >= 2
    assert scheduler.num_waiting_for_streaming_input == 1
