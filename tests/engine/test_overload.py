"""Overload in vLLM's scheduler, without a model."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    build_scheduler,
    make_request,
    model_output,
)
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

BASE = {"levels": 3, "default_level": 1, "predictor": {"enabled": False}}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    def build(policy: dict, **options):
        path = tmp_path_factory.mktemp("policy") / "policy.yaml"
        path.write_text(json.dumps(BASE | policy))
        settings = {"policy": str(path)}
        return build_scheduler(SemanticScheduler, semantic_sched=settings, **options)

    return build


def add(scheduler, *names: str, extra=None, **fields) -> None:
    for name in names:
        request = make_request(name, **fields)
        if extra is not None:
            request.sampling_params.extra_args = extra
        scheduler.add_request(request)


def step(scheduler) -> dict[str, Code]:
    """Run one engine step; returns the code of each refusal by request."""
    arranged = scheduler.schedule()
    outputs = scheduler.update_from_output(arranged, model_output(scheduler, arranged))
    told = {}
    for output in (output for each in outputs.values() for output in each.outputs):
        if output.finish_reason == FinishReason.ERROR:
            told[output.request_id] = Refusal.from_text(output.stop_reason).code
    return told


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_overflowing_requests_are_refused_in_the_next_step(build, async_scheduling) -> None:
    policy = {"admission": {"queue": {"requests": 2}}}
    scheduler = build(policy, max_num_seqs=2, async_scheduling=async_scheduling)
    add(scheduler, "a", "b", "c", "d", "e", urgency=1, output_tokens=30)
    assert step(scheduler) == {"e": Code.OVER_CAPACITY}
    add(scheduler, "urgent", urgency=0)
    assert step(scheduler) == {"d": Code.OVER_CAPACITY}
    assert scheduler.counters.total("refused_requests", ("over_capacity", "1")) == 2
    assert scheduler.counters.total("policy_errors") == 0


def test_request_ends_when_its_client_no_longer_waits(build) -> None:
    scheduler = build({}, max_num_seqs=1)
    now = [100.0]
    scheduler.clock.seconds = lambda: now[0]
    add(scheduler, "running", output_tokens=50, extra={"ttl_ms": 500})
    assert step(scheduler) == {}
    add(scheduler, "hasty", extra={"ttl_ms": 500})
    for number, sent in enumerate((-1, "soon", True, None)):
        add(scheduler, f"wrong {number}", extra={"ttl_ms": sent})
    now[0] += 0.4
    assert step(scheduler) == {}
    now[0] += 0.2
    assert step(scheduler) == {"hasty": Code.QUEUE_TIMEOUT}
    assert "running" in scheduler.requests
    now[0] += 100.0
    assert step(scheduler) == {}
    assert scheduler.counters.total("invalid_hints") == 4
    assert scheduler.counters.total("policy_errors") == 0


def test_deadline_refuses_at_once_or_ends_a_waiting_request(build) -> None:
    policy = {"deadlines": {"stated": True}, "preemption": {"enabled": False}}
    scheduler = build(policy, max_num_seqs=1)
    now = [100.0]
    scheduler.clock.seconds = lambda: now[0]
    add(scheduler, "running", output_tokens=50)
    assert step(scheduler) == {}
    add(scheduler, "impossible", extra={"urgency": 2, "deadline_ms": 1})
    add(scheduler, "urgent", extra={"urgency": 0, "deadline_ms": 500, "slo_ttft_ms": 100})
    add(scheduler, "wrong", extra={"deadline_ms": "soon", "slo_ttft_ms": 0})
    assert step(scheduler) == {"impossible": Code.DEADLINE}
    now[0] += 0.6
    assert step(scheduler) == {"urgent": Code.QUEUE_TIMEOUT}
    assert scheduler.counters.total("invalid_hints") == 1
    assert scheduler.counters.total("policy_errors") == 0


def test_parts_of_one_client_request_have_one_origin(build) -> None:
    scheduler = build({"dedup": "waiting"}, max_num_seqs=1)
    add(scheduler, "running", output_tokens=50)
    step(scheduler)
    key = {"dedup_key": "k"}
    parts = ["cmpl-7f3a-0-0a1b2c3d", "cmpl-7f3a-1-ffffffff", "0_cmpl-7f3a-2-11111111"]
    add(scheduler, *parts, extra=key)
    assert step(scheduler) == {}
    add(scheduler, "cmpl-7f3b-0-22222222", extra=key)
    assert set(step(scheduler)) == set(parts)


def test_refusing_one_of_several_answers_ends_all(build) -> None:
    scheduler = build({"admission": {"queue": {"requests": 2}}}, max_num_seqs=1)
    add(scheduler, "running", output_tokens=50)
    step(scheduler)
    answers = [f"{number}_cmpl-7f3a-0-0a1b2c3d" for number in range(4)]
    add(scheduler, *answers)
    assert step(scheduler) == dict.fromkeys(answers, Code.OVER_CAPACITY)
    add(scheduler, "0_cmpl-other", "1_cmpl-other")
    assert step(scheduler) == {}


def test_dropping_one_of_several_answers_ends_all(build) -> None:
    limits = {"max_per_request": 0, "after_limit": "drop"}
    tiers = [{"name": "a"}, {"name": "b", "drop": True}]
    levels = {"levels": 2, "default_level": 1}
    policy = levels | {"tiers": tiers, "preemption": limits, "protect": {"level": None}}
    scheduler = build(policy, max_num_seqs=4)
    answers = [f"{number}_cmpl-7f3a-0-0a1b2c3d" for number in range(4)]
    add(scheduler, *answers, output_tokens=50)
    step(scheduler)
    add(scheduler, "u1", "u2", extra={"urgency": 0})  # each wants a victim
    assert step(scheduler) == dict.fromkeys(answers, Code.DROPPED)
    assert set(scheduler.requests) == {"u1", "u2"}
    assert scheduler.counters.total("refused_requests", ("dropped", "b")) == 4
    assert scheduler.counters.total("policy_errors") == 0
    add(scheduler, "4_cmpl-7f3a-0-0a1b2c3d")  # an answer that was on its way
    assert step(scheduler) == {"4_cmpl-7f3a-0-0a1b2c3d": Code.DROPPED}


def test_prompt_that_never_fits_is_refused_on_arrival(build) -> None:
    scheduler = build({}, num_blocks=11)  # one of them is vLLM's null block
    most = 10 * BLOCK_SIZE
    add(scheduler, "fits", prompt_tokens=most, output_tokens=1)
    add(scheduler, "large", prompt_tokens=most + 1, output_tokens=1, extra={"urgency": 0})
    assert step(scheduler) == {"large": Code.TOO_LARGE}
    assert Code.TOO_LARGE.status == 400 and not Code.TOO_LARGE.retryable
    step(scheduler)
    assert not scheduler.requests
    request = make_request("long", prompt_tokens=most - 4, output_tokens=20)
    request.sampling_params.min_tokens = 6
    scheduler.add_request(request)
    assert step(scheduler) == {"long": Code.TOO_LARGE}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_answer_that_never_fits_ends_where_the_blocks_do(build, async_scheduling) -> None:
    scheduler = build({}, num_blocks=11, async_scheduling=async_scheduling)
    add(scheduler, *"abc", output_tokens=10)
    big = make_request("big", prompt_tokens=100, output_tokens=1000, urgency=0)
    scheduler.add_request(big)
    add(scheduler, *"def", output_tokens=10)
    for _ in range(200):
        step(scheduler)
    assert not scheduler.requests
    assert big.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert big.num_tokens == 10 * BLOCK_SIZE + 1 and big.num_preemptions == 0


def test_observing_changes_no_request(build) -> None:
    scheduler = build({"observe": True}, num_blocks=11)
    add(scheduler, "big", prompt_tokens=10 * BLOCK_SIZE + 1, output_tokens=1000)
    assert step(scheduler) == {} and scheduler.requests["big"].max_tokens == 1000


def test_unusable_dedup_key_is_counted_and_the_request_served(build) -> None:
    scheduler = build({"dedup": "waiting"})
    for number, key in enumerate([7, "", "x" * 500, ["a"]]):
        add(scheduler, f"r{number}", extra={"dedup_key": key})
    assert step(scheduler) == {}
    assert scheduler.counters.total("invalid_dedup_keys") == 4


def test_dedup_keys_are_not_read_with_dedup_off(build) -> None:
    scheduler = build({"dedup": "none"})
    for number, key in enumerate([7, "key", "key"]):
        add(scheduler, f"r{number}", extra={"dedup_key": key})
    assert step(scheduler) == {}
    assert scheduler.counters.total("invalid_dedup_keys") == 0
    assert not len(scheduler.core.overload.dedup)


def test_requests_that_cannot_receive_a_refusal_are_not_refused(build) -> None:
    scheduler = build({"admission": {"queue": {"requests": 1}}}, max_num_seqs=1)
    add(scheduler, "running", "waiting", output_tokens=50)
    step(scheduler)
    request = make_request("session")
    request.resumable = True
    scheduler.add_request(request)
    assert step(scheduler) == {}
    assert "session" in scheduler.requests


def test_request_is_admitted_when_admission_raises(build) -> None:
    scheduler = build({"admission": {"queue": {"requests": 1}}}, max_num_seqs=1)
    scheduler.core.overload.admit = lambda *args: 1 / 0
    add(scheduler, "a", "b", "c")
    while scheduler.get_num_unfinished_requests():
        assert step(scheduler) == {}
    assert scheduler.counters.total("policy_errors", "admission") == 3


def test_pressure_shedding_and_slos_are_reported(build) -> None:
    tiers = [{"name": "premium", "slo": {"ttft": 10.0}}, {"name": "b"}, {"name": "c"}]
    scheduler = build({"tiers": tiers}, max_num_seqs=1)
    add(scheduler, "a", "b", "c", "d", urgency=0)
    step(scheduler)
    step(scheduler)
    gauges = scheduler.gauges()
    assert gauges["resource_use"]["seats"] == 4.0
    assert gauges["slo_compliance"] == {"premium": 1.0}
    assert 0.5 < gauges["slo_headroom"]["premium"] <= 1.0
    assert gauges["queued_tokens"]["premium"] > 0


CHAOS = {
    "preemption": {"min_level_gap": 1},
    "admission": {"queue": {"requests": 3, "timeout": 5.0}},
    "dedup": "running",
    "shedding": {"enabled": True, "waiting": "end"},
    "tiers": [
        {"name": "premium", "slo": {"ttft": 1.0}},
        {"name": "standard", "queue": {"requests": 2, "timeout": 2.0}},
        {"name": "background", "shed_order": 1},
    ],
}
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.sampled_from([None, None, "k"])),
        st.tuples(st.just("abort"), st.integers(0, 30), st.none()),
        st.tuples(st.just("step"), st.sampled_from([0.01, 0.3, 2.0]), st.none()),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_request_ends_exactly_once_under_random_traffic(build, async_scheduling) -> None:
    scheduler = build(CHAOS, max_num_seqs=2, num_blocks=12, async_scheduling=async_scheduling)
    clock = SimpleNamespace(now=0.0)
    scheduler.clock.seconds = lambda: clock.now
    rounds = iter(range(10**6))

    @settings(max_examples=60)
    @given(ACTIONS)
    def run(actions) -> None:
        begin, sent, aborted, told = next(rounds), [], set(), {}

        def one_step(seconds: float) -> None:
            clock.now += seconds
            for name, code in step(scheduler).items():
                assert name not in told and name not in aborted
                told[name] = code

        for what, number, key in actions:
            if what == "add":
                sent.append(f"{begin}/{len(sent)}x")
                extra = {"urgency": number} | ({"dedup_key": key} if key else {})
                add(scheduler, sent[-1], extra=extra, prompt_tokens=30, output_tokens=12)
            elif what == "abort" and number < len(sent) and sent[number] in scheduler.requests:
                aborted.add(sent[number])
                scheduler.finish_requests(sent[number], RequestStatus.FINISHED_ABORTED)
            elif what == "step":
                one_step(number)
        for _ in range(500):
            if not scheduler.has_requests():
                break
            one_step(0.05)
        assert not scheduler.requests and not scheduler.jobs
        load, everyone = scheduler.core.overload.load, scheduler.core.allocations.all
        assert not everyone.queued and not sum(load.outstanding())
        assert not len(scheduler.core.overload.dedup)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert scheduler.counters.total("policy_errors") == 0
        clock.now += 100.0  # what this round has measured leaves the windows

    run()
