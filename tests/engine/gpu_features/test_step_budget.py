"""Who gets the tokens of a step: a long prefill leaves running decodes theirs."""

import pytest
from engine_steps import EngineSteps

pytestmark = pytest.mark.engine

DECODES = [f"decode{number}" for number in range(32)]


def decoding(build) -> EngineSteps:
    scheduler = build(max_num_seqs=64, num_blocks=6000, max_num_batched_tokens=512)
    steps = EngineSteps(scheduler)
    steps.add(*DECODES, urgency=2, prompt_tokens=8, output_tokens=3000)
    steps.run(3)
    return steps


def test_decodes_go_on_beside_a_stream_of_long_prefills(build, build_stock) -> None:
    """Of the same level, each as soon as the last one has its first token."""

    def served(build) -> tuple[int, int]:
        steps = decoding(build)
        prompts = 0
        for _ in range(200):
            last = steps.requests.get(f"long{prompts}")
            if last is None or last.num_output_tokens:
                prompts += 1
                steps.add(f"long{prompts}", urgency=2, prompt_tokens=8000, output_tokens=5)
            steps.run()
        return sum(steps.requests[name].num_output_tokens for name in DECODES), prompts

    (tokens, prompts), (stock_tokens, stock_prompts) = served(build), served(build_stock)
    assert tokens >= 0.9 * stock_tokens
    assert prompts >= stock_prompts - 1


def test_prefills_alone_get_their_tokens_as_from_vllm(build, build_stock) -> None:
    """One after the other: sharing the steps evenly would end the first ones later."""

    def scheduled(build) -> list[dict[str, int]]:
        steps = EngineSteps(build(max_num_batched_tokens=512, long_prefill_token_threshold=200))
        steps.add("a", "b", "c", urgency=2, prompt_tokens=400, output_tokens=5)
        steps.run(4)
        return steps.scheduled

    assert scheduled(build) == scheduled(build_stock)
