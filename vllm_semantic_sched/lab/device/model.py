"""Folders that vLLM takes for a model: a configuration without weights, and a tokenizer if asked
for."""

import json
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.bench.tiny_model import write_tokenizer
from vllm_semantic_sched.operate.real_model import write_once

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
# Drafters of an 8B model: one layer, or a model of its own.
_EAGLE: dict[str, Any] = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
_EAGLE3: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
_LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
}
# One compressed vector per token and layer (MLA), and 64 experts.
_DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Beside each layer's attention, an indexer keeps a key of 128 numbers for each token, and chooses
# the 2,048 tokens that the layer reads. One more layer drafts a token (MTP).
_DEEPSEEK_V3_2: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Nine layers of ten keep a state instead of KV (Mamba 2), and 64 experts.
_GRANITE_TINY: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_head": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
}
_EMBEDDING: dict[str, Any] = {
    "architectures": ["MistralModel"],
    "model_type": "mistral",
    "max_position_embeddings": 32_768,
    "sliding_window": None,
}
# All tokens see each other, in one step: no KV is kept.
_BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
}
# Images of up to 1,456 by 1,456 pixels: 169 tokens for each tile of 364 by 364, and for the whole.
_IMAGE_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_IDEFICS3: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "vocab_size": _VOCABULARY + 64,
    "image_token_id": _VOCABULARY + 1,
    "pad_token_id": 2,
    "scale_factor": 2,
    "text_config": _LLAMA | {"vocab_size": _VOCABULARY + 64},
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 364,
        "patch_size": 14,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA,
    "sliding-8b": _LLAMA | _SLIDING,
    "deepseek-v2-lite": _LLAMA | _DEEPSEEK_V2_LITE,
    "deepseek-v3.2": _LLAMA | _DEEPSEEK_V3_2,
    "qwen3-30b-a3b": _LLAMA | _QWEN3_30B,
    "granite-4.0-h-tiny": _LLAMA | _GRANITE_TINY,
    "idefics3-8b": _LLAMA | _IDEFICS3,
    "e5-mistral-7b": _LLAMA | _EMBEDDING,
    "bge-base": _LLAMA | _BERT,
}
"""Configurations, by name; all with the vocabulary of the tokenizer that is at hand."""
DRAFTERS = {"eagle": "eagle-8b", "eagle3": "eagle3-8b", "draft_model": "llama-3.2-1b"}
"""Models that draft tokens for others, by the method of `--speculative-config`."""
_DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle-8b": _LLAMA | _EAGLE,
    "eagle3-8b": _LLAMA | _EAGLE3,
    "llama-3.2-1b": _LLAMA | _LLAMA_1B,
}
_FILES: dict[str, dict[str, Any]] = {
    "e5-mistral-7b": {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "pool", "type": "sentence_transformers.models.Pooling"},
        ],
        "pool/config.json": {"word_embedding_dimension": 4096, "pooling_mode_lasttoken": True},
    },
    "idefics3-8b": {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
        },
        "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 169},
    },
}
"""Beside the configuration: what makes a model one for embeddings, or turns images into tokens."""


def make_shape(folder: Path, shape: str = "llama-3.1-8b", tokenizer: bool = False) -> bool:
    """Write a model without weights into `folder`; False if it was there already. KeyError: no such
    shape."""
    config = (SHAPES | _DRAFTERS)[shape]

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer:
            write_tokenizer(folder)
            if "vision_config" in config:
                _add_image_tokens(folder)
        for name, content in (_FILES.get(shape, {}) | {"config.json": config}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=1))

    return write_once(folder, json.dumps([shape, tokenizer]), write)


def _add_image_tokens(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens(list(_IMAGE_TOKENS), special_tokens=True)
    tokenizer.save_pretrained(str(folder))
