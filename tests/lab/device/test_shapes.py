"""Models of all kinds on the emulated device, in virtual time."""

import pytest
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.lab.device.layers import kv_cache_spec
from vllm_semantic_sched.lab.device.model import SHAPES
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

GROUPS = {
    "llama-3.1-8b": [(FullAttentionSpec, 32)],
    "sliding-8b": [(SlidingWindowSpec, 8)] * 3 + [(FullAttentionSpec, 8)],
    "deepseek-v2-lite": [(MLAAttentionSpec, 27)],
    "deepseek-v3.2": [(MLAAttentionSpec, 2 * 61)],
    "qwen3-30b-a3b": [(FullAttentionSpec, 48)],
    "granite-4.0-h-tiny": [(MambaSpec, 4)] * 9 + [(FullAttentionSpec, 4)],
    "idefics3-8b": [(FullAttentionSpec, 32)],
    "e5-mistral-7b": [(FullAttentionSpec, 32)],
    "bge-base": [],
}
"""Of vLLM: the kind and the number of layers."""
WEIGHTS = {
    "llama-3.1-8b": 13.2,
    "sliding-8b": 13.2,
    "deepseek-v2-lite": 28.6,
    "deepseek-v3.2": 1246.7,
    "qwen3-30b-a3b": 55.8,
    "granite-4.0-h-tiny": 12.72,
    "idefics3-8b": 13.2,
    "e5-mistral-7b": 13.2,
}
"""GiB, in 16 bits and without the embeddings."""


MEMORY = {"deepseek-v3.2": 1600.0}
"""GiB of the device, if not 80."""


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_and_blocks_are_those_of_the_model(shape, models) -> None:
    """The KV cache takes what the weights leave."""
    memory = MEMORY.get(shape, 80.0)
    options = {"shape": shape, "kv_gib": None, "memory_gib": memory, "max_model_len": 500}
    if shape == "idefics3-8b":
        options |= {"model": models(shape), "max_model_len": 16_384}
    with VirtualEngine(EngineConfig(**options)) as engine:
        config = engine.scheduler.kv_cache_config
        groups = [
            (type(group.kv_cache_spec), len(group.layer_names)) for group in config.kv_cache_groups
        ]
        assert groups == GROUPS[shape]
        if not groups:
            assert vllm_api.total_kv_blocks(engine.scheduler) == 0
            return
        specs = kv_cache_spec(engine.core.vllm_config)
        layers = config.kv_cache_groups[-1].layer_names
        kv = config.num_blocks * sum(specs[layer].page_size_bytes for layer in layers) / 2**30
        assert kv == pytest.approx(memory * 0.92 - 2 - WEIGHTS[shape], abs=0.1)


def test_sparse_attention_has_keys_of_indexers() -> None:
    with VirtualEngine(EngineConfig(shape="deepseek-v3.2")) as engine:
        specs = kv_cache_spec(engine.core.vllm_config)
    assert {spec.page_size_bytes for spec in specs.values()} == {16 * 2 * 576, 16 * 132}


def test_layers_of_other_sizes_have_blocks_of_other_sizes() -> None:
    """Half as many heads: twice as many tokens in a block of the same size."""
    fewer_heads = {"hf_overrides": {"swa_num_key_value_heads": 4}}
    with VirtualEngine(EngineConfig(shape="sliding-8b", options=fewer_heads)) as engine:
        specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
    assert [spec.block_size for spec in specs] == [32, 32, 32, 16]
    assert len({spec.page_size_bytes for spec in specs}) == 1


def test_attention_and_states_share_blocks() -> None:
    """A block of 400 tokens is as large as the states of a layer, as on a GPU."""
    with VirtualEngine(EngineConfig(shape="granite-4.0-h-tiny", prefix_cache=True)) as engine:
        specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
        assert {(spec.block_size, spec.page_size_bytes) for spec in specs} == {(400, 819_200)}
        state = 2 * (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128))  # of 16 bits, and three inputs
        assert specs[0].real_page_size_bytes == state < specs[0].page_size_bytes
