"""Random engines, loads and disturbances on the emulated device."""

import pytest

from vllm_semantic_sched.lab.device import fuzz
from vllm_semantic_sched.lab.device.fuzz import Outcome, draw_case, run_case
from vllm_semantic_sched.lab.device.sanitizer import DeviceError
from vllm_semantic_sched.lab.device.virtual import VirtualEngine

pytestmark = pytest.mark.engine

CASES = 200
"""Of 100 requests. More: `python -m vllm_semantic_sched.lab.device.fuzz --requests 500000`."""


def test_random_cases_pass() -> None:
    """With each scheduler all requests get their own answers, and nothing is left."""
    outcomes = []
    for number in range(CASES):
        case = draw_case(number)
        try:
            outcomes.append(run_case(case))
        except Exception as error:
            raise AssertionError(case.name) from error
    assert sum(outcome.requests for outcome in outcomes) >= 20_000
    for what in ("left", "accepted", "copied", "held", "preempted", "loaded"):
        assert sum(bool(getattr(outcome, what)) for outcome in outcomes) > 5, what


def test_cases_cover_all_kinds() -> None:
    names = " ".join(draw_case(number).name for number in range(CASES))
    for word in (
        *("fcfs", "priority", "semantic", "ems", "tiers", "asynchronous", "synchronous"),
        *("llama-3.1-8b", "sliding-8b", "runner 1", "runner 2", "prefix cache"),
        *("deepseek-v2-lite", "qwen3-30b-a3b", "granite-4.0-h-tiny", "3 drafts", "2 adapters"),
        *("connector swap", "connector multi", "connector remote", "connector both"),
        *("reloads", "pauses", "resets with connector", "clients leave", "random holds"),
    ):
        assert word in names, word


def test_case_is_the_same_for_its_number() -> None:
    assert draw_case(3) == draw_case(3) != draw_case(4)


@pytest.mark.parametrize("left", ["blocks", "jobs", "errors"])
def test_what_is_left_is_found(left, monkeypatch) -> None:
    number = next(at for at in range(20) if draw_case(at).engine.scheduler == "semantic")
    run = VirtualEngine.run

    def run_and_leave(engine: VirtualEngine) -> None:
        run(engine)
        if left == "blocks":
            engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(2)
        elif left == "jobs":
            engine.scheduler.jobs["ghost"] = None
        else:
            engine.scheduler.counters.add("policy_errors")

    monkeypatch.setattr(VirtualEngine, "run", run_and_leave)
    with pytest.raises(DeviceError, match=f"{left} are left|{left} of the policy"):
        run_case(draw_case(number, requests=5))


def test_failed_case_is_named(monkeypatch, capsys) -> None:
    def fail(case) -> None:
        raise DeviceError("was lost", "r1", 5)

    monkeypatch.setattr(fuzz, "run_case", fail)
    monkeypatch.setattr("sys.argv", ["fuzz", "--requests", "300", "--first", "7"])
    with pytest.raises(SystemExit) as end:
        fuzz.main()
    printed = capsys.readouterr().out
    assert end.value.code == 1
    assert "case 7: " in printed and "step 5, request r1: was lost" in printed
    assert "case 8" not in printed


def test_study_goes_on_where_its_log_ends(monkeypatch, tmp_path, capsys) -> None:
    ran = []

    def run(case) -> Outcome:
        ran.append(case.number)
        return Outcome(case.number, 1, 0, 0, False)

    monkeypatch.setattr(fuzz, "run_case", run)
    log = str(tmp_path / "log.jsonl")
    for requests in ("10", "20"):
        arguments = ["fuzz", "--requests", requests, "--each", "5", "--log", log]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as end:
            fuzz.main()
        assert not end.value.code
    assert ran == [0, 1, 2, 3]
