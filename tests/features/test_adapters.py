"""LoRA adapters: one, more than there are slots for, and requests that sit out steps."""

import random
from dataclasses import replace

import pytest
from engine_steps import EngineSteps
from virtual_runs import FEATURE_LOAD, check_feature
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from vllm_semantic_sched.engine.vllm_api import can_sit_out
from vllm_semantic_sched.engine.vllm_api.capabilities import HELD_ADAPTERS_COUNT

pytestmark = pytest.mark.engine

A, B = LoRARequest("A", 1, "/a"), LoRARequest("B", 2, "/b")
SOON = 3  # steps


def with_adapters(most: int) -> list:
    """The load, with adapters up to that number, or none, drawn for each request."""
    chance = random.Random(5)
    return [replace(request, adapter=chance.randint(0, most)) for request in FEATURE_LOAD]


def used(tokens: dict[str, int], steps: EngineSteps) -> set[LoRARequest]:
    """The adapters of a step."""
    adapters = {steps.requests[name].lora_request for name in tokens}
    return {adapter for adapter in adapters if adapter is not None}


@pytest.mark.parametrize(
    ("adapters", "slots"), [pytest.param(1, 1, id="one"), pytest.param(5, 2, id="more_than_slots")]
)
def test_requests_of_adapters_get_the_same_answers(adapters, slots) -> None:
    """Prompts that share their beginnings have other KV with another adapter."""
    check_feature(
        with_adapters(adapters), adapters=slots, prefix_cache=True, holds=HELD_ADAPTERS_COUNT
    )


@pytest.fixture
def lora_steps(build):
    """Builds an engine with one slot."""

    def lora_steps(policy: str = "", **options) -> EngineSteps:
        return EngineSteps(build(policy, lora_config=LoRAConfig(max_loras=1), **options))

    return lora_steps


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seats", [4, 40])
def test_urgent_request_gets_a_slot(lora_steps, asynchronous, seats) -> None:
    """From the requests of another adapter, of which more wait: vLLM would serve these first. A
    step preempts at most eight."""
    steps = lora_steps(max_num_seqs=seats, async_scheduling=asynchronous)
    others = [f"a{number}" for number in range(2 * seats)]
    steps.add(*others, urgency=4, output_tokens=30, lora_request=A)
    steps.run(5)
    steps.add("urgent", urgency=1, output_tokens=5, lora_request=B)
    assert steps.until_scheduled("urgent", 20) in range(SOON + seats // 8 + 1)
    steps.finish(300)
    assert all(len(used(tokens, steps)) <= 1 for tokens in steps.scheduled)
    assert steps.scheduler.counters.total("policy_errors") == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_adapter_of_a_prefill_that_yields_keeps_its_slot(lora_steps, asynchronous) -> None:
    steps = lora_steps(max_num_seqs=8, max_num_batched_tokens=2048, async_scheduling=asynchronous)
    steps.add("long", urgency=4, prompt_tokens=6000, output_tokens=5, lora_request=A)
    steps.run()
    steps.add("urgent", urgency=0, output_tokens=30)
    steps.add("other", urgency=4, output_tokens=30, lora_request=B)
    steps.finish(200)  # vLLM asserts that no more adapters run than there are slots
    assert steps.first["other"] > steps.first["urgent"]
    assert all(len(used(tokens, steps)) <= 1 for tokens in steps.scheduled)
    assert steps.scheduler.counters.total("policy_errors") == 0


def test_nobody_sits_out_with_adapters_where_vllm_does_not_count_them(lora_steps) -> None:
    """Below vLLM 0.33: a request that sat out a step would lose its adapter's slot."""
    steps = lora_steps("protect: {level: 0, price: 0.9, worth: 100000}\n", num_blocks=120)
    scheduler = steps.scheduler
    assert can_sit_out(scheduler.vllm_config) is HELD_ADAPTERS_COUNT
    steps.add("urgent", urgency=0, output_tokens=100)
    steps.add("low", urgency=4, output_tokens=100, lora_request=A)
    steps.run(3)
    steps.add("large", urgency=1, prompt_tokens=1900, output_tokens=5)
    steps.add("other", urgency=4, output_tokens=30, lora_request=B)
    steps.finish(400)
    assert bool(scheduler.core.protection.steps) is HELD_ADAPTERS_COUNT
    assert all(len(used(tokens, steps)) <= 1 for tokens in steps.scheduled)
