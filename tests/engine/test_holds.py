"""Running requests that are held for a protected one, on vLLM's real scheduler."""

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.bench.standalone import (
    build_scheduler,
    make_request,
    model_output,
    run_step,
)
from vllm_semantic_sched.engine.vllm_api import why_no_holds

POLICY = "predictor: {enabled: false}\nprotect: {level: 0, slowdown: 1.0, longest_hold: 60}\n"


@pytest.fixture
def build(tmp_path):
    def build(extra: str = "", **options):
        path = tmp_path / "policy.yaml"
        path.write_text(POLICY + extra)
        settings = {"policy": str(path), "profile": "cpu-2core-tiny"}
        return build_scheduler(SemanticScheduler, semantic_sched=settings, **options)

    return build


def add(scheduler, name: str, urgency: int, **fields) -> None:
    scheduler.add_request(make_request(name, urgency=urgency, **fields))


def stepped(scheduler) -> set[str]:
    return set(run_step(scheduler).num_scheduled_tokens)


def test_others_keep_their_seats_and_wait_until_the_urgent_one_is_done(build) -> None:
    scheduler = build(max_num_seqs=4)
    add(scheduler, "a", 3)
    add(scheduler, "b", 4)
    assert stepped(scheduler) == {"a", "b"}
    add(scheduler, "urgent", 0, output_tokens=5)
    before = {name: scheduler.requests[name].num_output_tokens for name in ("a", "b")}
    for _ in range(5):
        assert stepped(scheduler) == {"urgent"}
    assert "urgent" not in scheduler.requests
    assert {n: scheduler.requests[n].num_output_tokens for n in before} == before
    assert len(scheduler.running) == 2
    assert stepped(scheduler) == {"a", "b"}
    scheduler.gauges()
    counters = scheduler.counters
    assert counters.total("hold_steps") == 5 and counters.total("tokens_forgone") == 10
    assert counters.total("held_seconds") > 0
    assert scheduler.jobs["a"].waited > 0


def test_less_urgent_requests_are_not_admitted_meanwhile(build) -> None:
    scheduler = build(max_num_seqs=4)
    add(scheduler, "urgent", 0, output_tokens=3)
    add(scheduler, "other", 3)
    assert stepped(scheduler) == {"urgent"}
    add(scheduler, "urgent too", 0, output_tokens=1)
    assert stepped(scheduler) == {"urgent", "urgent too"}
    assert stepped(scheduler) == {"urgent"}
    assert stepped(scheduler) == {"other"}


def test_a_running_prefill_is_held(build) -> None:
    scheduler = build(max_num_batched_tokens=100)
    add(scheduler, "long", 4, prompt_tokens=350)
    assert stepped(scheduler) == {"long"}
    add(scheduler, "urgent", 0, output_tokens=2)
    assert stepped(scheduler) == {"urgent"}
    assert stepped(scheduler) == {"urgent"}
    assert stepped(scheduler) == {"long"}


def test_nobody_is_held_while_the_last_urgent_token_is_in_flight(build) -> None:
    scheduler = build(max_num_seqs=4, async_scheduling=True)
    add(scheduler, "other", 3)
    add(scheduler, "urgent", 0, output_tokens=2)
    in_flight = []
    scheduled = []
    for _ in range(4):
        step = scheduler.schedule()
        scheduled.append(set(step.num_scheduled_tokens))
        in_flight.append(step)
        if len(in_flight) == 2:
            first = in_flight.pop(0)
            scheduler.update_from_output(first, model_output(scheduler, first))
    # Two steps compute both of its tokens; the third is scheduled before the second is back.
    assert scheduled == [{"urgent"}, {"urgent"}, {"other"}, {"other"}]


def test_kv_shortage_takes_the_blocks_of_a_held_request(build) -> None:
    scheduler = build(max_num_seqs=4, num_blocks=7)  # six blocks of 16 tokens
    add(scheduler, "other", 4, prompt_tokens=60, output_tokens=4)
    assert stepped(scheduler) == {"other"}
    add(scheduler, "urgent", 0, prompt_tokens=30, output_tokens=20)
    while "urgent" in scheduler.requests:
        assert "other" not in stepped(scheduler)
    assert stepped(scheduler) == {"other"}


def test_holds_end_when_their_credit_is_spent(build) -> None:
    scheduler = build("", max_num_seqs=4)
    scheduler.core.protection.knobs = scheduler.core.protection.knobs.model_copy(
        update={"longest_hold": 1.0, "share": 0.5}
    )
    now = [0.0]
    scheduler.clock.seconds = lambda: now[0]
    add(scheduler, "other", 3, output_tokens=200)
    assert stepped(scheduler) == {"other"}
    add(scheduler, "urgent", 0, output_tokens=200)
    both = 0
    for _ in range(100):
        now[0] += 0.1
        both += "other" in stepped(scheduler)
    assert 40 <= both <= 60


def test_aging_counts_the_time_held(build) -> None:
    scheduler = build("aging: {enabled: true, interval: 1.0}\n", max_num_seqs=4)
    now = [0.0]
    scheduler.clock.seconds = lambda: now[0]
    add(scheduler, "other", 2, output_tokens=200)
    assert stepped(scheduler) == {"other"}
    add(scheduler, "urgent", 0, output_tokens=3)
    for _ in range(3):
        now[0] += 1.1
        assert stepped(scheduler) == {"urgent"}
    now[0] += 1.1
    assert stepped(scheduler) == {"other"}
    assert scheduler.jobs["other"].overdue


@pytest.mark.parametrize(
    ("pipeline", "draft", "v2", "reason"),
    [
        (1, None, False, None),
        (2, None, False, "pipeline parallelism"),
        (1, object(), True, None),
        (1, object(), False, "speculative decoding on vLLM's V1 model runner"),
    ],
)
def test_holds_are_off_where_they_are_not_safe(pipeline, draft, v2, reason) -> None:
    class Config:
        class parallel_config:
            pipeline_parallel_size = pipeline

        speculative_config = draft
        use_v2_model_runner = v2

    assert why_no_holds(Config) == reason
