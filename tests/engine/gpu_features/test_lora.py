"""More adapters than slots for them."""

import pytest
from engine_steps import EngineSteps
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine

A, B = LoRARequest("A", 1, "/a"), LoRARequest("B", 2, "/b")


def adapters(tokens: dict[str, int], steps: EngineSteps) -> set[LoRARequest]:
    found = {steps.requests[name].lora_request for name in tokens}
    return {adapter for adapter in found if adapter is not None}


@pytest.fixture
def lora_steps(build):
    """Builds an engine with one slot."""

    def lora_steps(policy: str = "", **options) -> EngineSteps:
        return EngineSteps(build(policy, lora_config=LoRAConfig(max_loras=1), **options))

    return lora_steps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_adapter_of_a_prefill_that_yields_keeps_its_slot(lora_steps, asynchronous) -> None:
    steps = lora_steps(max_num_seqs=8, max_num_batched_tokens=2048, async_scheduling=asynchronous)
    steps.add("long", urgency=4, prompt_tokens=6000, output_tokens=5, lora_request=A)
    steps.run()
    steps.add("urgent", urgency=0, output_tokens=30)
    steps.add("other", urgency=4, output_tokens=30, lora_request=B)
    steps.finish(200)  # vLLM asserts that no more adapters run than there are slots
    assert steps.first["other"] > steps.first["urgent"]
    assert all(len(adapters(tokens, steps)) <= 1 for tokens in steps.scheduled)
    assert steps.scheduler.counters.total("policy_errors") == 0
