"""The KV cache of a model's layers, by its configuration: what vLLM's layers would say on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

_STATES = ("mamba", "linear_attention")


def kv_cache_spec(config: VllmConfig) -> dict[str, KVCacheSpec]:
    """One entry for each layer of the model's configuration, and for each indexer of sparse
    attention; none if the model reads all tokens at once (BERT)."""
    text = config.model_config.hf_text_config
    if config.model_config.attn_type == "encoder_only":
        return {}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    specs = {kind: _spec(kind, config) for kind in set(kinds)}
    layers = {f"model.layers.{index}.mixer": specs[kind] for index, kind in enumerate(kinds)}
    if hasattr(text, "index_topk"):
        indexer = _indexer(config)
        layers |= {f"model.layers.{index}.indexer": indexer for index in range(len(kinds))}
    return layers


def align_blocks(config: VllmConfig) -> None:
    """Make the blocks of attention as large as the states of Mamba layers, if there are any. vLLM
    does so once the model is loaded; it asks the layers, and here are none."""
    if config.model_config.is_hybrid:
        current_platform._align_hybrid_block_size(config, TritonAttentionBackend)


def exported_states(
    spec: KVCacheSpec, cache: KVCacheConfig
) -> Callable[[int, int], tuple[int, int] | None]:
    """For `Group.exported`: what vLLM's Mamba layers do while the prefix cache is on."""
    if not isinstance(spec, MambaSpec) or spec.mamba_cache_mode != "align":
        return lambda start, end: None
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    assert cache.hash_block_size and cache.cache_hit_alignment_tokens
    hashed = cache.hash_block_size
    aligned = cache.cache_hit_alignment_tokens

    def exported(start: int, end: int) -> tuple[int, int] | None:
        [offset], [column] = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hashed,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=aligned,
        )
        return (start + offset, column) if offset else None

    return exported


def _spec(kind: str, config: VllmConfig) -> KVCacheSpec:
    model = config.model_config
    if kind in _STATES:
        return _state(config)
    shape: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": model.get_num_kv_heads(config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model),
    }
    if model.use_mla:
        shape |= {"num_kv_heads": 1, "max_tp_shards": 1}
        return MLAAttentionSpec(**shape, cache_dtype_str=config.cache_config.cache_dtype)
    if kind == "sliding_attention":
        heads = getattr(model.hf_text_config, "swa_num_key_value_heads", shape["num_kv_heads"])
        shape |= {"num_kv_heads": heads}
        return SlidingWindowSpec(**shape, sliding_window=model.hf_text_config.sliding_window)
    return FullAttentionSpec(**shape)


def _indexer(config: VllmConfig) -> MLAAttentionSpec:
    """Of DeepSeek V3.2: a key of 8 bits a number, and a scale of 4 bytes for each 128."""
    width = config.model_config.hf_text_config.index_head_dim
    return MLAAttentionSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=width + width // 128 * 4,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )


def _state(config: VllmConfig) -> MambaSpec:
    """As a Mamba 2 layer: it can also write the state in the middle of a prompt."""
    model = config.model_config
    cache = config.cache_config
    layers, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    assert cache.mamba_block_size is not None
    return MambaSpec(
        shapes=layers.get_mamba_state_shape_from_config(config),
        dtypes=layers.get_mamba_state_dtype_from_config(config),
        block_size=cache.mamba_block_size,
        page_size_padded=cache.mamba_page_size_padded,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=1,
    )
