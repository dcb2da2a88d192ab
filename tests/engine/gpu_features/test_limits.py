"""Tokens and KV that limits of vLLM's or ours leave to a request."""

import pytest
from engine_steps import EngineSteps
from fake_device import FakeDevice
from orders import preempt
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_semantic_sched.engine.kv.connector import host_slots

pytestmark = pytest.mark.engine

AT_ONCE = 3


# Models without KV cache: embeddings, reranking


def test_model_without_kv_cache_needs_no_host_pool() -> None:
    assert host_slots(KVCacheConfig(1, kv_cache_tensors=[], kv_cache_groups=[]), 4.0) == 0


# Tokens of decodes beside loads


def decode_beside_loads(build_swapping, gated_level: int | None, loads: int) -> EngineSteps:
    """A level 0 decodes while victims come back by loads of ten steps."""
    scheduler = build_swapping(
        "preemption: {max_per_request: 1000}\n",
        max_num_seqs=8,
        num_blocks=200,
        max_num_batched_tokens=100,
    )
    scheduler.core.gated_level = gated_level
    steps = EngineSteps(scheduler, FakeDevice(scheduler, load_steps=10))
    names = [f"low{number}" for number in range(loads)]
    steps.add(*names, urgency=4, prompt_tokens=60, output_tokens=60)
    steps.run(4)
    for request in list(scheduler.running):
        preempt(scheduler, request)
    steps.run(2)
    assert len(scheduler.kv_holding_waiting) == loads
    steps.add("urgent", urgency=0, output_tokens=60)
    steps.run()
    return steps


@pytest.mark.parametrize("loads", [1, 2, 3])
def test_gate_leaves_the_decode_its_token_beside_loads(build_swapping, loads) -> None:
    steps = decode_beside_loads(build_swapping, 0, loads)
    for _ in range(8):
        assert "urgent" in steps.run()
    steps.finish()


@pytest.mark.parametrize("loads", [1, 2, 3])
def test_loads_are_not_taken_for_prefills(build_swapping, loads) -> None:
    steps = decode_beside_loads(build_swapping, None, loads)
    for _ in range(5):
        assert steps.scheduler.snapshot().decoding == 1
        steps.run()


# Requests larger than what a limit of ours leaves to them


@pytest.mark.parametrize(
    ("name", "tenant"),
    [("reserved", None), ("fairness", "t"), ("fairness", None), ("throughput", None)],
)
def test_request_larger_than_its_limit_starts_in_an_idle_engine(
    build, shipped, clock_of, name, tenant
) -> None:
    """It needs 82 of 100 blocks."""
    scheduler = build(shipped(name), hints_only=False, max_num_seqs=8, num_blocks=101)
    clock, steps = clock_of(scheduler), EngineSteps(scheduler)
    steps.add("large", urgency=2, tenant=tenant, prompt_tokens=1300)
    steps.add(*(f"b{number}" for number in range(5)), urgency=2, tenant=tenant, output_tokens=10)
    last = scheduler.core.policy.levels - 1
    steps.add(*(f"c{number}" for number in range(5)), urgency=last, tenant=tenant, output_tokens=10)
    while scheduler.requests and steps.count < 1500:
        clock.now += 0.1
        steps.run()
    assert not scheduler.requests
    assert scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("prompt_tokens", [1000, 1300])
def test_request_larger_than_limit_precedes_less_urgent(
    build, shipped, clock_of, prompt_tokens
) -> None:
    """A stream of level 3 has answers of at most 32 tokens; vLLM seats the level 2 in 9 steps."""
    scheduler = build(shipped("reserved"), hints_only=False, max_num_seqs=8, num_blocks=101)
    clock, steps = clock_of(scheduler), EngineSteps(scheduler)
    count = 0
    for step in range(100):
        clock.now += 0.02
        for _ in range(4 - sum(name.startswith("low") for name in scheduler.requests)):
            tokens = 20 + 7 * count % 13
            steps.add(f"low{count}", urgency=3, prompt_tokens=40, output_tokens=tokens)
            count += 1
        if step == 10:
            steps.add("large", urgency=2, prompt_tokens=prompt_tokens, output_tokens=10)
        steps.run()
    assert steps.first.get("large", 1000) <= 10 + 35


# Preemptions that a request is protected from


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resets_of_the_cache_protect_nobody_from_urgent_requests(build, asynchronous) -> None:
    """`preemption.max_per_request` counts preemptions for more urgent requests. Weights are updated
    three times with requests running."""
    scheduler = build(max_num_seqs=2, async_scheduling=asynchronous)
    steps = EngineSteps(scheduler)
    steps.add("a", "b", urgency=4, output_tokens=500)
    steps.run(2)
    for _ in range(3):
        scheduler.reset_prefix_cache(reset_running_requests=True)
        steps.run(3)
    steps.add("urgent", urgency=0, output_tokens=5)
    assert steps.until_scheduled("urgent", 100) in range(AT_ONCE + 1)
