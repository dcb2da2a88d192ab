"""KV that is loaded beside steps, by the swap connector or from elsewhere: order and progress are
those of an engine that loads at once."""

import random
from collections.abc import Iterable

import pytest
from engine_steps import EngineSteps
from fake_device import FakeDevice, expected
from orders import preempt
from remote_kv import RemoteDevice, remote_config

from vllm_semantic_sched import SemanticScheduler

pytestmark = pytest.mark.engine

AT_ONCE = 3  # steps in which a request starts that has the right to a seat
NO_LIMIT = "preemption: {max_per_request: 1000}\n"
AGING = "aging: {enabled: true, interval: 2}\n"
DEADLINES = (
    "tiers: [{name: a}, {name: b, slo: {ttft: 2}}, {name: c, slo: {ttft: 2}}, {name: d},"
    " {name: e}]\n"
    "deadlines: {enabled: true}\n"
)

TIMERS = [
    pytest.param("", id="none"),
    pytest.param(AGING, id="aging"),
    pytest.param(DEADLINES, id="deadlines"),
]


def swapping_steps(scheduler: SemanticScheduler, load_steps: int = 3) -> EngineSteps:
    return EngineSteps(scheduler, FakeDevice(scheduler, load_steps=load_steps))


def assert_right_answers(steps: EngineSteps, names: Iterable[str] = ()) -> None:
    """All that have ended got the answer that they get on a device which keeps all KV."""
    for name in names or steps.ended:
        request = steps.requests[name]
        assert list(request.output_token_ids) == expected(request), name


# A request comes back to the seat that was freed for it


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("load_steps", [1, 5])
@pytest.mark.parametrize("low_tokens", [40, 200])
def test_swapped_request_returns_before_a_less_urgent_one_runs(
    build_swapping, low_tokens, load_steps, asynchronous
) -> None:
    scheduler = build_swapping(
        max_num_seqs=1, num_blocks=200, async_scheduling=asynchronous, max_num_batched_tokens=2048
    )
    steps = swapping_steps(scheduler, load_steps)
    steps.add("mid", urgency=1, prompt_tokens=60, output_tokens=30)
    steps.run(3)
    steps.add("urgent", urgency=0, output_tokens=3)
    steps.add("low", urgency=4, output_tokens=low_tokens)
    steps.finish()
    # One after another they take 33 steps, and the load some.
    assert steps.ended["mid"] <= 33 + load_steps + 5
    assert steps.ended["urgent"] < steps.ended["mid"] < steps.ended["low"]
    assert_right_answers(steps)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_swapped_requests_return_before_new_less_urgent_ones(build_swapping, asynchronous) -> None:
    scheduler = build_swapping(num_blocks=400, async_scheduling=asynchronous)
    steps = swapping_steps(scheduler)
    mids = [f"mid{number}" for number in range(4)]
    steps.add(*mids, urgency=1, prompt_tokens=100, output_tokens=100)
    steps.run(3)
    steps.add("urgent0", "urgent1", urgency=0, output_tokens=10)
    steps.add(*(f"low{number}" for number in range(6)), urgency=4, output_tokens=100)
    steps.finish()
    # 100 tokens, 10 steps away, a load of 3.
    assert max(steps.ended[name] for name in mids) <= 125
    assert_right_answers(steps)


def test_level_0_starts_beside_preempted_request(build_swapping) -> None:
    scheduler = build_swapping(max_num_seqs=2, num_blocks=200)
    steps = swapping_steps(scheduler)
    steps.add("victim", urgency=3, prompt_tokens=100, output_tokens=100)
    steps.add("other", urgency=0, output_tokens=300)
    steps.run(3)
    steps.add("urgent", urgency=0, output_tokens=3)
    steps.add("low", urgency=4, output_tokens=200)
    steps.run(20)
    steps.add("late", urgency=0, output_tokens=3)
    assert steps.until_scheduled("late", 50) in range(AT_ONCE + 1)
    steps.finish()
    assert_right_answers(steps)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("load_steps", [10, 50])
def test_level_0_starts_beside_a_load(build, load_steps, asynchronous) -> None:
    """One of two seats has a level 4; a level 3 that loads, or has loaded, is no reason to wait."""
    scheduler = build(
        max_num_seqs=2,
        kv_transfer_config=remote_config({"cached": 90}),
        async_scheduling=asynchronous,
    )
    steps = EngineSteps(scheduler, RemoteDevice(scheduler, load_steps))
    steps.add("low", urgency=4, output_tokens=300)
    steps.run()
    steps.add("cached", urgency=3, prompt_tokens=100, output_tokens=300)
    steps.run(3)
    steps.add("urgent", urgency=0, output_tokens=300)
    assert steps.until_scheduled("urgent", 50) in range(AT_ONCE + 1)
    steps.run(20)
    steps.add("late", urgency=0, output_tokens=300)
    assert steps.until_scheduled("late", 50) in range(AT_ONCE + 1)
    steps.finish()


def test_level_0_starts_while_loads_have_all_seats(build_swapping) -> None:
    scheduler = build_swapping(NO_LIMIT, max_num_seqs=8, num_blocks=400)
    steps = swapping_steps(scheduler, load_steps=50)
    steps.add(*(f"v{number}" for number in range(8)), urgency=3, prompt_tokens=60)
    steps.run(3)
    for request in list(scheduler.running):
        preempt(scheduler, request)
    steps.run(2)
    assert len(scheduler.kv_holding_waiting) == 8
    steps.add("urgent", urgency=0, output_tokens=5)
    assert steps.until_scheduled("urgent", 50) in range(AT_ONCE + 1)
    steps.finish()
    assert_right_answers(steps)


@pytest.mark.parametrize("blocks", [58, 60, 61])
def test_two_loads_that_need_the_pool_make_progress(build_swapping, blocks) -> None:
    scheduler = build_swapping(NO_LIMIT, max_num_seqs=8, num_blocks=blocks)
    steps = swapping_steps(scheduler)
    steps.add("v0", "v1", urgency=4, prompt_tokens=440, output_tokens=60)
    steps.run(3)
    steps.add("urgent", urgency=0, prompt_tokens=900, output_tokens=5)
    while "urgent" in scheduler.requests:
        steps.run()
    steps.add("next", urgency=1, prompt_tokens=300, output_tokens=5)
    steps.finish(300)
    assert steps.longest_empty() <= 10
    assert_right_answers(steps)


# Timers that expire during a load


@pytest.mark.parametrize("policy", TIMERS)
def test_promotion_while_a_swapped_request_is_loaded(build_swapping, clock_of, policy) -> None:
    scheduler = build_swapping(policy, max_num_seqs=2, num_blocks=200)
    clock, steps = clock_of(scheduler), swapping_steps(scheduler, load_steps=30)
    steps.add("victim", urgency=3, prompt_tokens=100, output_tokens=100)
    steps.add("other", urgency=0, output_tokens=300)
    steps.run(3)
    steps.add("urgent", urgency=0, output_tokens=3)
    steps.add(*(f"low{number}" for number in range(6)), urgency=4, output_tokens=60)
    for _ in range(45):
        clock.now += 0.1
        steps.run()
    # Level 0: what the rival has gained by waiting protects it from level 1.
    steps.add("late", urgency=0, output_tokens=3)
    assert steps.until_scheduled("late", 75) in range(AT_ONCE + 1)
    steps.finish()
    assert_right_answers(steps)
    assert scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("policy", TIMERS)
def test_promotion_while_remote_kv_is_loaded(build, clock_of, policy) -> None:
    scheduler = build(policy, max_num_seqs=2, kv_transfer_config=remote_config({"cached": 90}))
    clock = clock_of(scheduler)
    steps = EngineSteps(scheduler, RemoteDevice(scheduler, load_steps=30))
    steps.add("other", urgency=0, output_tokens=300)
    steps.run()
    steps.add("cached", urgency=2, prompt_tokens=100, output_tokens=30)
    for step in range(45):
        clock.now += 0.1
        if step == 5:
            steps.add(*(f"low{number}" for number in range(6)), urgency=4, output_tokens=60)
        steps.run()
    assert "cached" in steps.first
    steps.add("late", urgency=0, output_tokens=3)
    assert steps.until_scheduled("late", 75) in range(AT_ONCE + 1)
    steps.finish()
    assert scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("seed", range(2))
def test_shipped_shares_keeps_its_order_through_loads(
    build_swapping, shipped, clock_of, seed
) -> None:
    """A preemption a second, loads of 0.2 s, for 20 s."""
    policy = shipped("shares", "admission", "shedding", "retention")
    scheduler = build_swapping(
        policy, hints_only=False, max_num_seqs=6, num_blocks=300, max_num_batched_tokens=400
    )
    chance, count, levels = random.Random(seed), 0, scheduler.core.policy.levels
    clock, steps = clock_of(scheduler), swapping_steps(scheduler, load_steps=4)
    for step in range(400):
        clock.now += 0.05
        while len(scheduler.requests) < 14:
            tokens = {
                "prompt_tokens": chance.randint(40, 150),
                "output_tokens": chance.randint(20, 100),
            }
            steps.add(f"r{count}", urgency=chance.randrange(levels), **tokens)
            count += 1
        if step % 20 == 0 and scheduler.running:
            preempt(scheduler, chance.choice(scheduler.running))
        steps.run()
        assert scheduler.counters.total("policy_errors") == 0, step
    assert scheduler.counters.total("loaded_tokens") > 0
    assert_right_answers(steps)


# Requests whose last output is in flight


@pytest.mark.parametrize(
    "policy", ["", "weighted_levels: {factor: 4}\n"], ids=["default", "weighted"]
)
def test_victims_with_output_in_flight_precede_less_urgent(build, policy) -> None:
    """Asynchronously, vLLM cannot seat a victim again in the step that preempted it; the seat that
    is left over must not go to a level 4 for the length of its answer."""

    def last_victim(asynchronous: bool) -> int:
        scheduler = build(policy, max_num_seqs=2, num_blocks=64, async_scheduling=asynchronous)
        steps = EngineSteps(scheduler)
        steps.add("v1", "v2", urgency=2, prompt_tokens=400, output_tokens=60)
        steps.run(4)
        steps.add("low", urgency=4, prompt_tokens=40, output_tokens=200)
        steps.add("urgent", urgency=0, prompt_tokens=700, output_tokens=30)
        steps.finish()
        return max(steps.ended["v1"], steps.ended["v2"])

    assert last_victim(asynchronous=True) <= last_victim(asynchronous=False) + 10


# Lookups that a connector has not answered


def looking_up(build, asked: int, low_tokens: int, **options) -> EngineSteps:
    """Level 4 runs; then comes a level 0 for which the connector has no answer yet."""
    config = remote_config({"urgent": 90}, lookups={"urgent": asked})
    scheduler = build(NO_LIMIT, kv_transfer_config=config, **options)
    steps = EngineSteps(scheduler, RemoteDevice(scheduler))
    steps.add("low1", "low2", urgency=4, prompt_tokens=low_tokens, output_tokens=300)
    steps.run(2)
    steps.add("urgent", urgency=0, prompt_tokens=100, output_tokens=5)
    return steps


def test_lookup_preempts_at_most_one_request_in_vain(build) -> None:
    steps = looking_up(build, 10**6, 20, max_num_seqs=2)
    steps.run(14)
    assert steps.scheduler.counters.total("preemptions") == 1
    assert steps.without(["low1"], 2) <= 3 and steps.without(["low2"], 2) <= 3


def test_request_starts_when_its_lookup_has_ended(build) -> None:
    steps = looking_up(build, 3, 20, max_num_seqs=2)
    assert steps.until_scheduled("urgent", 60) is not None
    steps.finish()


def test_prefill_does_not_yield_to_a_pending_lookup(build) -> None:
    steps = looking_up(build, 10**6, 2000, max_num_seqs=8, max_num_batched_tokens=100)
    assert steps.without(["low1", "low2"], 2) == 0
    steps.run(12)
    assert steps.without(["low1", "low2"], 3) <= 1
    assert all(sum(tokens.values()) >= 99 for tokens in steps.scheduled[4:])
