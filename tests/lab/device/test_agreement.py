"""The simulator agrees with vLLM on the emulated device."""

from dataclasses import replace

import pytest

from vllm_semantic_sched.lab.device.agreement import ALL, Agreement, agreement
from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig

pytestmark = pytest.mark.engine

# More than the engine can serve: requests wait for seats, are preempted and held.
LOAD = LoadConfig(
    requests=80, rate=20.0, prompts=Lengths(6, 0.8, 20, 3000), answers=Lengths(4, 0.6, 2, 200)
)
SMALL = EngineConfig(seats=16, blocks=2000, budget=512, max_model_len=4096)


def worst(found: Agreement) -> dict[str, float]:
    """Largest error of each figure, over the levels."""
    return {
        "e2e": max(map(abs, found.e2e.values())),
        "ttft": max(map(abs, found.ttft_p99.values())),
        "steps": abs(found.steps),
        "tokens": abs(found.tokens),
    }


@pytest.mark.parametrize(
    ("policy", "asynchronous"), [("fcfs", True), ("ems", True), ("ems", False)]
)
def test_simulator_agrees_with_the_device(policy, asynchronous) -> None:
    config = replace(SMALL, policy=policy, asynchronous=asynchronous)
    found = agreement(draw_load(LOAD), config)
    assert found.device.levels[ALL].count == found.simulated.levels[ALL].count == LOAD.requests
    errors = worst(found)
    assert errors["e2e"] < 0.03 and errors["steps"] < 0.02 and errors["tokens"] < 0.02, errors
    assert errors["ttft"] < 0.1, errors


def test_short_of_blocks_the_tail_is_preempted_as_in_vllm() -> None:
    found = agreement(draw_load(LOAD), replace(SMALL, policy="priority", blocks=400))
    assert max(worst(found).values()) < 0.1


@pytest.mark.parametrize(("policy", "blocks"), [("fcfs", 2000), ("ems", 300)])
def test_shared_prefixes_are_found_as_by_vllm(policy, blocks) -> None:
    """With room for all prefixes, and where they displace each other."""
    load = draw_load(replace(LOAD, prefixes=3))
    found = agreement(load, replace(SMALL, policy=policy, prefix_cache=True, blocks=blocks))
    assert found.device.found > 0.4 * sum(len(request.prompt) for request in load)
    assert abs(found.found) < 0.02
    assert max(worst(found).values()) < 0.02


def test_rank_by_uncached_work_is_that_of_the_simulator() -> None:
    """The engine asks vLLM's prefix cache, the simulator its own; both then serve in one order."""
    load = draw_load(replace(LOAD, prefixes=8, prefix_tokens=1024))
    policy = {"base": "sjf", "rank_uncached": True}
    config = replace(SMALL, policy=policy, prefix_cache=True, blocks=700)
    ranked = agreement(load, config)
    assert abs(ranked.found) < 0.02
    assert max(worst(ranked).values()) < 0.02
    by_length = agreement(load, replace(config, policy={"base": "sjf"}))
    assert ranked.device.found > by_length.device.found
