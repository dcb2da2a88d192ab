"""Who gets the tokens of a step: a long prefill leaves running decodes theirs."""

import pytest
from engine_steps import EngineSteps

pytestmark = pytest.mark.engine

DECODES = [f"decode{number}" for number in range(32)]


def decoding(build, level: int, output_tokens: int, asynchronous: bool = False) -> EngineSteps:
    scheduler = build(
        max_num_seqs=64,
        num_blocks=6000,
        max_num_batched_tokens=512,
        async_scheduling=asynchronous,
    )
    steps = EngineSteps(scheduler)
    steps.add(*DECODES, urgency=level, prompt_tokens=8, output_tokens=output_tokens)
    steps.run(3)
    return steps


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("decodes", "prefill", "output_tokens"),
    [
        pytest.param(4, 0, 400, id="more urgent"),
        pytest.param(4, 4, 2000, id="same level, less work left"),
        pytest.param(0, 0, 2000, id="all of level 0"),
    ],
)
def test_decodes_go_on_beside_a_long_prefill(
    build, build_stock, decodes, prefill, output_tokens, asynchronous
) -> None:
    """They need 32 of 512 tokens a step, so a prompt of 8,000 takes one step of 17 more."""

    def prefilled(build) -> EngineSteps:
        steps = decoding(build, decodes, output_tokens, asynchronous)
        steps.add("long", urgency=prefill, prompt_tokens=8000, output_tokens=5)
        while not steps.requests["long"].num_output_tokens:
            steps.run()
            assert steps.count < 200
        return steps

    ours, stock = prefilled(build), prefilled(build_stock)
    begin = ours.first["long"]
    without = sum(not set(DECODES) & tokens.keys() for tokens in ours.scheduled[begin:])
    assert without <= 1
    assert ours.count <= stock.count + 3


def test_decodes_go_on_beside_a_stream_of_long_prefills(build, build_stock) -> None:
    """Of the same level, each as soon as the last one has its first token."""

    def served(build) -> tuple[int, int]:
        steps = decoding(build, 2, 3000)
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
