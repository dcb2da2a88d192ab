"""Running requests that are held for a protected one, on vLLM's real scheduler."""

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.vllm_api import why_no_holds
from vllm_semantic_sched.engine.vllm_api.capabilities import HELD_ADAPTERS_COUNT
from vllm_semantic_sched.lab.bench.standalone import (
    build_scheduler,
    make_request,
    model_output,
    run_step,
)
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.holds.budget import WINDOW
from vllm_semantic_sched.policy.profile.formula import load_profile

# So much worth that all who may be held are held, until the price is paid.
POLICY = "predictor: {enabled: false}\ncorrect_profile: false\n"
PROTECT = "protect: {level: 0, price: 0.5, worth: 1.0e+9}\n"
PROFILE = "cpu-2core-tiny"


@pytest.fixture
def build(tmp_path):
    def build(extra: str = "", protect: str = PROTECT, **options):
        path = tmp_path / "policy.yaml"
        path.write_text(POLICY + protect + extra)
        settings = {"policy": str(path), "profile": PROFILE}
        return build_scheduler(SemanticScheduler, semantic_sched=settings, **options)

    return build


def add(scheduler, name: str, urgency: int, **fields) -> None:
    scheduler.add_request(make_request(name, urgency=urgency, **fields))


def stepped(scheduler) -> set[str]:
    return set(run_step(scheduler).num_scheduled_tokens)


def take_time(scheduler) -> list[float]:
    """Engine time that passes only as the test says: by its one item."""
    now = [0.0]
    scheduler.clock.seconds = lambda: now[0]
    return now


def set_price(core: SchedulingCore, price: float) -> None:
    protect = core.policy.protect.model_copy(update={"price": price})
    core.policy_ref.switch(core.policy.model_copy(update={"protect": protect}))


def test_held_requests_keep_seats_until_urgent_one_is_done(build) -> None:
    scheduler = build(max_num_seqs=3)
    add(scheduler, "a", 3)
    add(scheduler, "b", 4)
    assert stepped(scheduler) == {"a", "b"}
    add(scheduler, "urgent", 0, output_tokens=5)
    add(scheduler, "next", 4)
    assert stepped(scheduler) == {"a", "b", "urgent"}
    before = {name: scheduler.requests[name].num_output_tokens for name in ("a", "b")}
    for _ in range(4):
        assert stepped(scheduler) == {"urgent"}
    assert "urgent" not in scheduler.requests
    assert {n: scheduler.requests[n].num_output_tokens for n in before} == before
    assert len(scheduler.running) == 2
    assert stepped(scheduler) == {"a", "b", "next"}
    scheduler.gauges()
    counters = scheduler.counters
    assert counters.total("hold_steps") == 4 and counters.total("forgone_tokens") == 8
    assert counters.total("held_seconds") > 0
    assert scheduler.jobs["a"].waited > 0
    assert counters.total("policy_errors") == 0


def test_nobody_is_held_while_a_seat_is_free(build) -> None:
    scheduler = build(max_num_seqs=3)
    add(scheduler, "other", 3)
    add(scheduler, "urgent", 0)
    for _ in range(3):
        assert stepped(scheduler) == {"other", "urgent"}
    add(scheduler, "next", 4)
    assert stepped(scheduler) == {"other", "urgent", "next"}
    assert stepped(scheduler) == {"other", "urgent", "next"}  # all seats taken, nobody waits
    add(scheduler, "waiting", 4)
    assert stepped(scheduler) == {"urgent"}


def test_waiting_requests_start_beside_a_protected_one(build) -> None:
    scheduler = build(max_num_seqs=3)
    add(scheduler, "other", 3)
    add(scheduler, "urgent", 0)
    add(scheduler, "urgent too", 0, output_tokens=2)
    assert stepped(scheduler) == {"other", "urgent", "urgent too"}
    add(scheduler, "next", 4)
    assert stepped(scheduler) == {"urgent", "urgent too"}
    assert stepped(scheduler) == {"other", "urgent", "next"}


def test_a_prefill_goes_on_beside_a_protected_decode(build) -> None:
    scheduler = build(max_num_seqs=3, max_num_batched_tokens=100)
    add(scheduler, "urgent", 0)
    add(scheduler, "other", 3)
    assert stepped(scheduler) == {"urgent", "other"}
    add(scheduler, "long", 4, prompt_tokens=350)
    assert stepped(scheduler) == {"urgent", "other", "long"}
    add(scheduler, "next", 4)
    for prefilled in (98, 197, 296):
        assert scheduler.requests["long"].num_computed_tokens == prefilled
        assert stepped(scheduler) == {"urgent", "long"}
    assert scheduler.requests["long"].num_output_tokens == 1
    assert stepped(scheduler) == {"urgent"}


def test_nobody_is_held_while_the_last_urgent_token_is_in_flight(build) -> None:
    scheduler = build(max_num_seqs=2, async_scheduling=True)
    add(scheduler, "other", 3)
    add(scheduler, "urgent", 0, output_tokens=2)
    add(scheduler, "next", 4)
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
    assert scheduled == [{"other", "urgent"}, {"urgent"}, {"other"}, {"other", "next"}]


def test_kv_shortage_takes_the_blocks_of_a_held_request(build) -> None:
    scheduler = build(max_num_seqs=4, num_blocks=7)  # six blocks of 16 tokens
    add(scheduler, "other", 4, prompt_tokens=60, output_tokens=4)
    assert stepped(scheduler) == {"other"}
    add(scheduler, "urgent", 0, prompt_tokens=30, output_tokens=20)
    add(scheduler, "next", 4, prompt_tokens=60, output_tokens=4)
    assert stepped(scheduler) == {"other", "urgent"}
    while "urgent" in scheduler.requests:
        assert stepped(scheduler) == {"urgent"}
    assert scheduler.counters.total("hold_steps") == 0  # until `gauges` brings it up to date
    scheduler.gauges()
    # Seats were free, but no blocks for the next; then `other` lost its own.
    assert scheduler.counters.total("hold_steps") > 0
    assert scheduler.requests["other"].num_preemptions == 1
    assert stepped(scheduler) == {"other"}


def test_holds_stay_within_their_price(build) -> None:
    price, seconds = 5e-4, 0.25
    scheduler = build(max_num_seqs=2)
    set_price(scheduler.core, price)
    now = take_time(scheduler)
    add(scheduler, "other", 3, output_tokens=2000)
    add(scheduler, "urgent", 0, output_tokens=2000)
    assert stepped(scheduler) == {"other", "urgent"}
    add(scheduler, "next", 4)
    held = []
    for _ in range(round(2.5 * WINDOW / seconds)):
        now[0] += seconds
        if stepped(scheduler) == {"urgent"}:
            held.append(now[0])
    # A step of two requests has half its fixed part for each: that is lost when one sits it out.
    lost_in_a_step = load_profile(PROFILE).batch_terms.step / 2
    steps = int(price * WINDOW / lost_in_a_step)
    assert steps == 13
    assert len(held) > 2 * steps
    for first, last in zip(held, held[steps:], strict=False):
        # What was lost a window ago may be lost again, and no sooner.
        assert WINDOW - seconds < last - first <= WINDOW + 3 * seconds


@pytest.mark.parametrize("pace", ["null", 1])
def test_stream_ahead_of_its_reader_is_not_protected(build, pace) -> None:
    tiers = f"levels: 3\ntiers: [{{name: a, pace: {pace}}}, {{name: b}}, {{name: c}}]\n"
    scheduler = build(tiers, max_num_seqs=2)
    now = take_time(scheduler)
    add(scheduler, "other", 1, output_tokens=200)
    add(scheduler, "urgent", 0, output_tokens=200)
    assert stepped(scheduler) == {"other", "urgent"}
    add(scheduler, "next", 1)
    # The reader has two seconds of text after two tokens.
    assert stepped(scheduler) == {"urgent"}
    both = {"other", "urgent"} if pace == 1 else {"urgent"}
    assert [stepped(scheduler) for _ in range(5)] == [{"urgent"}, *4 * [both]]
    now[0] += 60.0  # and has read all of it
    assert stepped(scheduler) == {"urgent"}


@pytest.mark.parametrize(("pace", "held"), [("null", "other"), (1, "ahead")])
def test_stream_ahead_of_its_reader_is_held_first(build, pace, held) -> None:
    tiers = f"levels: 3\ntiers: [{{name: a}}, {{name: b, pace: {pace}}}, {{name: c}}]\n"
    scheduler = build(tiers, max_num_seqs=3)
    take_time(scheduler)
    # Pays for one request to sit out a step of three, not for two.
    lost_in_a_step = load_profile(PROFILE).batch_terms.step / 3
    set_price(scheduler.core, 1.5 * lost_in_a_step / WINDOW)
    add(scheduler, "ahead", 1)
    add(scheduler, "other", 2)
    for _ in range(5):
        stepped(scheduler)
    add(scheduler, "urgent", 0)
    add(scheduler, "next", 2)
    assert stepped(scheduler) == {"ahead", "other", "urgent"}
    assert stepped(scheduler) == {"ahead", "other", "urgent"} - {held}


def test_aging_counts_the_time_held(build) -> None:
    scheduler = build("aging: {enabled: true, interval: 1.0}\n", max_num_seqs=2)
    now = take_time(scheduler)
    add(scheduler, "other", 2, output_tokens=200)
    add(scheduler, "urgent", 0, output_tokens=200)
    assert stepped(scheduler) == {"other", "urgent"}
    add(scheduler, "next", 4)
    for _ in range(3):
        now[0] += 1.1
        assert stepped(scheduler) == {"urgent"}
    now[0] += 1.1
    assert stepped(scheduler) == {"other", "urgent"}
    assert scheduler.jobs["other"].credit.promotions >= 2


@pytest.mark.parametrize(
    ("pipeline", "draft", "v2", "lora", "reason"),
    [
        (1, None, False, None, None),
        (2, None, False, None, "pipeline parallelism"),
        (1, object(), True, None, None),
        (1, object(), False, None, "speculative decoding on vLLM's V1 model runner"),
        (1, None, False, object(), None if HELD_ADAPTERS_COUNT else "LoRA, before vLLM 0.33"),
    ],
)
def test_holds_are_off_where_they_are_not_safe(pipeline, draft, v2, lora, reason) -> None:
    class Config:
        class parallel_config:
            pipeline_parallel_size = pipeline

        speculative_config = draft
        use_v2_model_runner = v2
        lora_config = lora

    assert why_no_holds(Config) == reason
