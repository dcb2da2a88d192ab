"""The model and the device of an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig


class Hardware(NamedTuple):
    """The device of an engine."""

    kind: str  # torch's device type: cpu, cuda
    name: str  # as the driver reports it
    dtype: str  # of weights and activations, as torch names it
    memory: float  # GB of one device
    here: bool  # whether the calling process uses the device


def describe_hardware(config: VllmConfig) -> Hardware:
    """The device that an engine runs on."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return Hardware(
        kind=kind,
        name="this processor" if kind == "cpu" else current_platform.get_device_name(),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        memory=current_platform.get_device_total_memory() / 1e9,
        here=kind == "cpu" or (kind == "cuda" and torch.cuda.is_initialized()),
    )


def describe_model(config: VllmConfig) -> tuple[int, dict[str, Any]]:
    """The tensor-parallel size of an engine, and the arguments of `ModelShape.from_config`."""
    model = config.model_config
    return config.parallel_config.tensor_parallel_size, {
        "name": str(model.served_model_name or model.model),
        "config": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": model.quantization,
    }
