"""Models of all kinds on the emulated device, in virtual time."""

from dataclasses import replace
from typing import Any

import pytest
from virtual_runs import run
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, draw_load
from vllm_semantic_sched.lab.device.model import SHAPES
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

GROUPS = {
    "llama-3.1-8b": [(FullAttentionSpec, 32)],
    "sliding-8b": [(SlidingWindowSpec, 8)] * 3 + [(FullAttentionSpec, 8)],
    "deepseek-v2-lite": [(MLAAttentionSpec, 27)],
    "qwen3-30b-a3b": [(FullAttentionSpec, 48)],
    "granite-4.0-h-tiny": [(MambaSpec, 4)] * 9 + [(FullAttentionSpec, 4)],
    "idefics3-8b": [(FullAttentionSpec, 32)],
    "e5-mistral-7b": [(FullAttentionSpec, 32)],
}
"""Of vLLM: the kind and the number of layers."""
WEIGHTS = {
    "llama-3.1-8b": 13.2,
    "sliding-8b": 13.2,
    "deepseek-v2-lite": 28.6,
    "qwen3-30b-a3b": 55.8,
    "granite-4.0-h-tiny": 12.72,
    "idefics3-8b": 13.2,
    "e5-mistral-7b": 13.2,
}
"""GiB, in 16 bits and without the embeddings."""


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_and_blocks_are_those_of_the_model(shape, models) -> None:
    """Of a device of 80 GiB: what the weights leave."""
    model = models(shape) if shape == "idefics3-8b" else None
    with VirtualEngine(EngineConfig(shape=shape, kv_gib=None, model=model)) as engine:
        config = engine.scheduler.kv_cache_config
        groups = [
            (type(group.kv_cache_spec), len(group.layer_names)) for group in config.kv_cache_groups
        ]
        assert groups == GROUPS[shape]
        spec = config.kv_cache_groups[-1].kv_cache_spec
        kv = config.num_blocks * spec.page_size_bytes * groups[-1][1] / 2**30
        assert kv == pytest.approx(80 * 0.92 - 2 - WEIGHTS[shape], abs=0.1)


def test_attention_and_states_share_blocks() -> None:
    """A block of 400 tokens is as large as the states of a layer, as on a GPU."""
    with VirtualEngine(EngineConfig(shape="granite-4.0-h-tiny", prefix_cache=True)) as engine:
        specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
        assert {(spec.block_size, spec.page_size_bytes) for spec in specs} == {(400, 819_200)}
        state = 2 * (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128))  # of 16 bits, and three inputs
        assert specs[0].real_page_size_bytes == state < specs[0].page_size_bytes


# Few blocks, so that requests are preempted. Granite's hold 400 tokens, and each request has nine
# for states.
SHORT = LoadConfig(
    requests=24,
    rate=60.0,
    prompts=Lengths(5.5, 0.5, 20, 500),
    answers=Lengths(4, 0.5, 2, 150),
    prefixes=2,
    prefix_tokens=64,
)
LONG = replace(SHORT, answers=Lengths(4.6, 0.5, 2, 250), prefix_tokens=420)
LOADS = {
    "deepseek-v2-lite": (SHORT, 90),
    "qwen3-30b-a3b": (SHORT, 90),
    "granite-4.0-h-tiny": (LONG, 57),
}


@pytest.mark.parametrize("shape", LOADS)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_get_the_same_answers(shape, prefix_cache) -> None:
    """Their prompts share their beginnings."""
    config, blocks = LOADS[shape]
    load = draw_load(config)
    options: dict[str, Any] = {"shape": shape, "prefix_cache": prefix_cache, "max_model_len": 1200}
    plain, preempted = run(load, scheduler="fcfs", seats=24, **options)
    assert not preempted
    for scheduler in ("fcfs", "semantic"):
        for asynchronous in (False, True):
            options |= {"scheduler": scheduler, "asynchronous": asynchronous}
            got, preempted = run(load, blocks=blocks, seats=8, **options)
            assert got == plain
            assert preempted
