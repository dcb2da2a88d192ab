"""Folders that vLLM takes for a model: a configuration without weights, and a tokenizer if asked
for."""

import json
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.bench.tiny_model import write_once, write_tokenizer

_VOCABULARY = 32_768  # of the tokenizer
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "vocab_size": _VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# Three layers of four see a window, as in Gemma 3 and gpt-oss: two groups of blocks.
_SLIDING: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "sliding_window": 1024,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": [
        "full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)
    ],
}
# The drafter of an 8B model: one layer.
_EAGLE: dict[str, Any] = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "sliding-8b": _LLAMA | _SLIDING,
    "eagle-8b": _LLAMA | _EAGLE,
}
"""Configurations, by name."""


def make_shape(folder: Path, shape: str = "llama-3.1-8b", tokenizer: bool = False) -> bool:
    """Write a model without weights into `folder`; False if it was there already. KeyError: no such
    shape."""
    config = SHAPES[shape]

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            write_tokenizer(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=1))

    return write_once(folder, json.dumps([shape, tokenizer]), write)
