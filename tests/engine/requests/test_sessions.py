"""Sessions with streamed input: one request, whose inputs come one after another."""

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.policy.facts.job import LevelSource

pytestmark = pytest.mark.engine


@pytest.fixture
def scheduler(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("predictor: {enabled: false}\ncorrect_profile: false\n")
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=2, semantic_sched={"policy": str(policy)}
    )
    yield scheduler
    assert scheduler.counters.total("policy_errors") == 0


def say(scheduler, urgency=None, tokens: int = 20, answer: int = 1) -> None:
    scheduler.add_request(make_request("s", tokens, answer, urgency, resumable=True))


def known(scheduler) -> tuple[int, int, int]:
    job = scheduler.jobs["s"]
    return job.level, job.prompt_tokens, job.max_output_tokens


def test_each_input_may_state_a_level(scheduler) -> None:
    say(scheduler, urgency=4)
    run_step(scheduler)
    run_step(scheduler)
    assert known(scheduler) == (4, 20, 1)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, urgency=3, output_tokens=50))
    run_step(scheduler)
    say(scheduler, urgency=0, tokens=200, answer=9)
    tokens = scheduler.requests["s"].num_prompt_tokens
    assert known(scheduler) == (0, tokens, 9) and tokens >= 220
    assert "s" in run_step(scheduler).num_scheduled_tokens  # in the place of another one
    for _ in range(10):
        run_step(scheduler)
    say(scheduler)
    assert known(scheduler)[0] == 0  # it stays, unless an input states another
    assert scheduler.jobs["s"].level_source is LevelSource.HINT


def test_input_that_came_before_the_turn_ended(scheduler) -> None:
    say(scheduler, urgency=4, answer=3)
    run_step(scheduler)
    say(scheduler, urgency=1, tokens=30, answer=5)
    assert known(scheduler) == (4, 20, 3)
    for _ in range(4):
        run_step(scheduler)
    assert known(scheduler) == (1, scheduler.requests["s"].num_prompt_tokens, 5)
    for _ in range(8):
        run_step(scheduler)
    assert scheduler.jobs["s"] not in scheduler.core.running and not scheduler.running
    scheduler.finish_requests(["s"], scheduler.requests["s"].status.FINISHED_ABORTED)
    assert not scheduler.jobs and not scheduler.core.waiting


def test_level_that_cannot_be_read_is_counted(scheduler) -> None:
    say(scheduler, urgency=3)
    run_step(scheduler)
    say(scheduler, urgency="abc")
    assert known(scheduler)[0] == 3
    assert scheduler.counters.total("invalid_hints") == 1
