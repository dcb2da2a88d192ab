"""The level of a request, set and asked for between two steps of vLLM's scheduler."""

import json

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.requests.endings import requests_named
from vllm_semantic_sched.engine.vllm_api import PauseState
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.operate.why import account_of, timeline

pytestmark = pytest.mark.engine

CHAT = "chatcmpl-9a-0a1b2c3d"
COMPLETION = "cmpl-9a-{}-0a1b2c3d"
SEVERAL = ["0_chatcmpl-7-0a1b2c3d", "1_chatcmpl-7-0a1b2c3d"]


@pytest.fixture
def build(tmp_path):
    """Builds a scheduler with a policy that reads hints only, and an event log."""

    def make(text: str = "", **options):
        path = tmp_path / "policy.yaml"
        lines = ["predictor: {enabled: false}", "correct_profile: false", text]
        path.write_text("\n".join([*lines, f"events: {{path: {tmp_path}/events.jsonl}}"]))
        settings = {"policy": str(path)}
        return build_scheduler(SemanticScheduler, semantic_sched=settings, **options)

    return make


def add(scheduler, *names: str, urgency: int = 4) -> None:
    for name in names:
        scheduler.add_request(make_request(name, urgency=urgency, output_tokens=50))


def ask(scheduler, name: str, level=None, why: str = "") -> dict:
    given = {"id": name, "level": level, "by": "ann", "why": why}
    return commands.run(scheduler, f"level {json.dumps(given)}")


def running(scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_raised_request_runs_after_the_next_step_and_lowered_one_makes_room(
    build, asynchronous
) -> None:
    scheduler = build(max_num_seqs=2, async_scheduling=asynchronous)
    add(scheduler, "a", "b", "c", CHAT)
    run_step(scheduler)
    assert running(scheduler) == ["a", "b"]
    (standing,) = ask(scheduler, "9a")["requests"]
    assert standing["ahead"] == 1 and standing["state"] == "queued" and standing["level"] == 4
    assert standing["expected_wait"] > 0
    (changed,) = ask(scheduler, CHAT, 0)["requests"]
    assert (changed["level_before"], changed["level"], changed["ahead"]) == (4, 0, 0)
    assert changed["level_from"] == "operator"
    run_step(scheduler)
    assert running(scheduler) == [CHAT, "a"]
    (lowered,) = ask(scheduler, "chatcmpl-9a", 4)["requests"]
    assert lowered["state"] == "running" and "ahead" not in lowered
    add(scheduler, "urgent", urgency=0)
    add(scheduler, "next", urgency=1)
    run_step(scheduler)
    run_step(scheduler)
    assert running(scheduler) == ["urgent", "next"]
    ask(scheduler, "next", 1)
    total = scheduler.counters.total
    changes = [total("operator_levels", change) for change in ("raised", "lowered", "kept")]
    assert changes == [1, 1, 1] and total("policy_errors") == 0
    for _ in range(400):
        run_step(scheduler)
    assert not scheduler.jobs and not scheduler.requests


def test_running_request_that_was_raised_keeps_its_seat(build) -> None:
    scheduler = build(max_num_seqs=2)
    add(scheduler, "a", "b")
    run_step(scheduler)
    ask(scheduler, "b", 0)
    add(scheduler, "urgent", urgency=1)
    run_step(scheduler)
    assert running(scheduler) == ["b", "urgent"]


def test_all_answers_to_a_prompt_change(build) -> None:
    scheduler = build(max_num_seqs=2)
    add(scheduler, "a", "b", *SEVERAL)
    run_step(scheduler)
    assert len(ask(scheduler, SEVERAL[1], 0)["requests"]) == 2
    run_step(scheduler)
    assert running(scheduler) == SEVERAL


def test_names_of_requests() -> None:
    prompts = [COMPLETION.format(number) for number in range(2)]
    others = ["chatcmpl-5-9a-0a1b2c3d", "chatcmpl-12345-0a1b2c3d", "cmpl-5-0-0a1b2c3d"]
    ids = dict.fromkeys([CHAT, *SEVERAL, *prompts, *others])
    assert requests_named(ids, "cmpl-9a") == prompts
    assert requests_named(ids, prompts[1]) == [prompts[1]]
    assert requests_named(ids, "chatcmpl-9a") == [CHAT]
    assert requests_named(ids, "9a") == [CHAT, *prompts]  # two requests with this x-request-id
    for name in ("7", "chatcmpl-7", *SEVERAL, "chatcmpl-7-0a1b2c3d"):
        assert requests_named(ids, name) == SEVERAL
    assert requests_named(ids, "12345") == ["chatcmpl-12345-0a1b2c3d"]
    assert requests_named(ids, "5") == ["cmpl-5-0-0a1b2c3d"]
    for name in ("", "chatcmpl", "chatcmpl-", "a", "0a1b2c3d", "1_9a", "0"):
        assert requests_named(ids, name) == []


def test_event_log_has_who_and_why(build, tmp_path) -> None:
    scheduler = build(max_num_seqs=1)
    add(scheduler, "a", CHAT)
    run_step(scheduler)
    ask(scheduler, "9a", 1, why="chest pain")
    for _ in range(150):
        run_step(scheduler)
    scheduler.shutdown()
    log = tmp_path / "events.jsonl"
    assert Audit(log).whole
    account = account_of([log], "chatcmpl-9a")
    assert account is not None
    assert "level 4 became 1 by ann: chest pain" in [text for _, text in timeline(account)]
    (line,) = [event for event in account.lines if event.get("reason") == "operator"]
    assert (line["level_before"], line["level"], line["level_from"]) == (4, 1, "operator")
    levels = {request.request: request.level for request in LogReader(0).requests(log)}
    assert levels == {"a": 4, CHAT: 1}


@pytest.mark.parametrize("level", [5, -1, "0", 1.0, True, [0]])
def test_level_that_does_not_exist_is_refused(build, level) -> None:
    scheduler = build()
    add(scheduler, "a")
    assert "valid: 0, 1, 2, 3, 4" in ask(scheduler, "a", level)["invalid"]
    assert scheduler.jobs["a"].level == 4


def test_unknown_or_ended_request_gets_an_empty_answer(build) -> None:
    scheduler = build()
    assert ask(scheduler, "a", 0) == ask(scheduler, "a") == {"requests": []}


@pytest.mark.parametrize(
    ("policy", "reason"),
    [("observe: true", "observes"), ("base: sjf", "without their levels"), ("base: fcfs", "fcfs")],
)
def test_policies_without_levels_refuse_a_change(build, policy, reason) -> None:
    scheduler = build(policy)
    add(scheduler, "a")
    assert reason in ask(scheduler, "a", 0)["refused"]


def test_no_wait_is_expected_of_a_paused_engine(build) -> None:
    scheduler = build(max_num_seqs=1)
    add(scheduler, "a", "b")
    run_step(scheduler)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    (standing,) = ask(scheduler, "b")["requests"]
    assert (standing["ahead"], standing["expected_wait"]) == (0, None)
