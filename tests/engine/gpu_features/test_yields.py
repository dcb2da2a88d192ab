"""Running requests that sit out a step for a waiting one: the step is not wasted, and nothing waits
for ever for what they hold."""

import random
from statistics import quantiles

import pytest
from engine_steps import EngineSteps
from fake_device import FakeDevice, expected
from remote_kv import RemoteDevice, remote_config
from vllm.v1.core.sched.interface import PauseState

from vllm_semantic_sched.engine.vllm_api import can_advance
from vllm_semantic_sched.lab.bench.standalone import model_output

pytestmark = pytest.mark.engine

UNPREEMPTIBLE = (
    "tiers: [{name: a}, {name: b}, {name: c}, {name: d}, {name: e, preemptible: false}]\n"
)
HOLDS = (
    "protect: {level: 0, price: 0.9, worth: 100000}\n"
    "preemption: {max_per_request: 1000, victim: cost, shorter: 4}\n"
    "weighted_levels: {factor: 4}\n"
    "aging: {enabled: true, interval: 0.5}\n"
)


# What the waiting request lacks is held by the request that yields to it


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prefill_does_not_yield_to_load_its_blocks_exclude(build, asynchronous) -> None:
    """vLLM sets aside the blocks that prefills under way will need: KV from elsewhere finds no
    room until this one is done."""
    scheduler = build(
        max_num_seqs=8,
        num_blocks=201,
        max_num_batched_tokens=100,
        kv_transfer_config=remote_config({"cached": 900}),
        async_scheduling=asynchronous,
    )
    steps = EngineSteps(scheduler, RemoteDevice(scheduler))
    steps.add("long", urgency=4, prompt_tokens=2400, output_tokens=5)  # 150 of 200 blocks
    steps.run(3)
    steps.add("cached", urgency=0, prompt_tokens=960, output_tokens=5)  # 60 blocks
    steps.run()
    steps.add("text", urgency=4, prompt_tokens=30, output_tokens=5)
    steps.finish(80)  # vLLM's own scheduler takes 35
    assert steps.longest_empty() <= 6


def test_prefill_does_not_yield_to_swapped_request_it_excludes(build_swapping) -> None:
    scheduler = build_swapping(
        UNPREEMPTIBLE, max_num_seqs=3, num_blocks=301, max_num_batched_tokens=100
    )
    steps = EngineSteps(scheduler, FakeDevice(scheduler, load_steps=2))
    steps.add("swapped", urgency=3, prompt_tokens=960, output_tokens=200)
    steps.run(12)
    steps.add("long", urgency=4, prompt_tokens=2400, output_tokens=5)
    steps.run()
    steps.add("decode", urgency=0, prompt_tokens=1600, output_tokens=2000)
    steps.run(17)
    steps.add("urgent", urgency=0, output_tokens=3)
    steps.run()
    assert scheduler.requests["swapped"].num_preemptions == 1
    begin = steps.count
    steps.run(100)
    # It has 99 of 100 tokens a step, and the other comes back after it.
    assert steps.ended["long"] <= begin + 60
    assert steps.without(["long", "swapped"], begin) <= 20
    assert "swapped" in steps.scheduled[-1] or "swapped" in steps.ended
    request = steps.requests["long"]
    assert list(request.output_token_ids) == expected(request)


@pytest.mark.parametrize("seed", range(4))
def test_no_run_of_empty_steps_with_kv_from_elsewhere(build, build_stock, seed) -> None:
    """Random requests under KV pressure, half of them with KV elsewhere."""

    def longest_empty(build) -> int:
        chance = random.Random(seed)
        names = [f"r{number}" for number in range(400)]
        found = {name: chance.randint(100, 2000) for name in names if chance.random() < 0.5}
        scheduler = build(
            max_num_seqs=8,
            num_blocks=chance.randint(150, 300),
            max_num_batched_tokens=200,
            kv_transfer_config=remote_config(found),
        )
        steps = EngineSteps(scheduler, RemoteDevice(scheduler))
        for name in names:
            prompt, output = chance.randint(20, 2200), chance.randint(3, 40)
            level = chance.randrange(5)
            steps.add(name, urgency=level, prompt_tokens=prompt, output_tokens=output)
            steps.run()
            while len(scheduler.requests) > 12 and steps.count < 1500:
                steps.run()
        return steps.longest_empty()

    assert longest_empty(build) <= longest_empty(build_stock) + 8


# A paused engine admits nobody


@pytest.mark.parametrize("asynchronous", [False, True])
def test_paused_engine_drains_as_fast_as_without_us(build, build_stock, asynchronous) -> None:
    def steps_to_drain(build) -> int:
        scheduler = build(max_num_seqs=8, max_num_batched_tokens=100, async_scheduling=asynchronous)
        steps = EngineSteps(scheduler)
        steps.add("long", urgency=4, prompt_tokens=1000, output_tokens=5)
        steps.run(2)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        steps.add("urgent", urgency=0, prompt_tokens=50, output_tokens=5)
        while scheduler.get_num_unfinished_requests():
            steps.run()
            assert steps.count < 300, "not drained"
        assert "urgent" not in steps.first
        return steps.count

    assert steps_to_drain(build) <= steps_to_drain(build_stock) + 2


# A prefill beside a stream of short urgent requests


@pytest.mark.parametrize("aging", [False, True])
def test_prefill_progresses_every_step_beside_urgent_request(build, clock_of, aging) -> None:
    """They leave 1,800 of 2,048 tokens of every step."""
    policy = "aging: {enabled: true, interval: 1}\n" if aging else ""
    scheduler = build(policy, max_num_seqs=64, num_blocks=4000, max_num_batched_tokens=2048)
    clock, steps = clock_of(scheduler), EngineSteps(scheduler)
    steps.add("long", urgency=4, prompt_tokens=4000, output_tokens=5)
    steps.run()
    for number in range(60):
        clock.now += 0.05
        steps.add(f"urgent{number}", urgency=0, prompt_tokens=200, output_tokens=3)
        steps.run()
    assert steps.ended.get("long", 1000) <= 40
    late = max(steps.first.get(f"urgent{number}", 1000) - 1 - number for number in range(57))
    assert late <= 3


def test_prefill_ends_beside_urgent_requests_near_capacity(build, clock_of) -> None:
    """50 a second, at times of the default profile: they take 10,000 of about 13,000 tokens a
    second, so that a prompt of 32,000 takes 10 s if no step is wasted."""
    chance = random.Random(3)
    scheduler = build(max_num_seqs=64, num_blocks=8000, max_num_batched_tokens=2048)
    clock, steps = clock_of(scheduler), EngineSteps(scheduler)
    due = begin = clock.now
    arrivals: dict[str, float] = {}
    waits: list[float] = []
    steps.add("long", urgency=4, prompt_tokens=32_000, output_tokens=1)
    while "long" in scheduler.requests and clock.now < begin + 60:
        while due <= clock.now:
            name = f"urgent{len(arrivals) + len(waits)}"
            arrivals[name] = due
            steps.add(name, urgency=0, prompt_tokens=200, output_tokens=5)
            due += chance.expovariate(50)
        clock.now += 0.0124 + 7.0e-5 * sum(steps.run().values())
        for name in [name for name in arrivals if steps.requests[name].num_output_tokens]:
            waits.append(clock.now - arrivals.pop(name))
    assert clock.now - begin <= 14
    assert quantiles(waits, n=100)[-1] <= 1.0  # with vLLM's own scheduler 2.4


# Requests that are not held


@pytest.mark.parametrize("seed", range(4))
def test_running_request_not_held_gets_tokens_every_step(build, clock_of, seed) -> None:
    """Through holds, reordering and KV shortages, some of them in one step."""
    chance = random.Random(seed)
    scheduler = build(
        HOLDS, max_num_seqs=12, num_blocks=chance.choice([61, 91]), async_scheduling=seed % 2 == 1
    )
    clock, steps = clock_of(scheduler), EngineSteps(scheduler)
    count = held_steps = 0
    for _ in range(300):
        clock.now += 0.03
        while len(scheduler.requests) < 20:
            steps.add(
                f"r{count}",
                urgency=chance.choice([0, 1, 2, 3, 4, 4, 4]),
                prompt_tokens=chance.randint(5, 90),
                output_tokens=chance.randint(3, 90),
            )
            count += 1
        before = {one.request_id for one in scheduler.running if can_advance(scheduler, one)}
        step = scheduler.schedule()
        held = {job.request_id for job in scheduler.core.protection.held}
        held_steps += bool(held)
        running = {one.request_id for one in scheduler.running}
        assert before & running - held <= step.num_scheduled_tokens.keys()
        scheduler.update_from_output(step, model_output(scheduler, step))
    assert held_steps and scheduler.counters.total("policy_errors") == 0
