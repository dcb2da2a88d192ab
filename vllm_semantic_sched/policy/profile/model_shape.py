"""The numbers of a transformer that cost time, from its `config.json`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}
# Families whose feed-forward layers have two matrices; all newer ones have three.
_UNGATED = re.compile("bloom|falcon|gpt2|gpt_bigcode|gpt_neox|gptj|mpt|opt|phi|starcoder2")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a transformer that cost time."""

    name: str
    width: int  # of the hidden state
    inner: int  # width of a feed-forward layer
    layers: int
    full_layers: int  # those whose attention sees the whole context
    heads: int  # of the attention
    head_dim: int
    parameters: int  # those that every token passes through, without experts and embeddings
    head_parameters: int  # of the output projection; only sampled positions pass through it
    expert_parameters: int  # of one expert, over all layers; 0 without experts
    experts: int  # per layer
    active_experts: int  # those that a token passes through
    kv_numbers: int  # numbers of KV per token, over all layers
    weight_bytes: float  # per number
    kv_bytes: float  # per number
    eight_bits: bool  # whether products are computed in 8 bits

    @classmethod
    def from_config(
        cls,
        name: str,
        config: Mapping[str, Any],
        dtype: str | None = None,
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
    ) -> Self:
        """The shape of a model by its `config.json`; `dtype` None: the configuration's. ValueError
        names a number that is missing."""
        whole = config
        config = config.get("text_config") or config
        width = _number(config, "hidden_size", "n_embd", "d_model")
        layers = _number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        heads = _number(config, "num_attention_heads", "n_head", "n_heads")
        kv_heads = _number(config, "num_key_value_heads", "num_kv_heads", default=heads)
        head_dim = _number(config, "head_dim", default=width // heads)
        inner = _number(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        experts = _number(config, "num_local_experts", "n_routed_experts", "num_experts", default=0)
        row = width * (2 if _UNGATED.fullmatch(str(config.get("model_type"))) else 3)
        attention = width * head_dim * 2 * (heads + kv_heads)
        kv_numbers = 2 * kv_heads * head_dim
        if config.get("kv_lora_rank"):
            attention, kv_numbers, head_dim = _latent_attention(config, width, heads, head_dim)
        dense = _number(config, "first_k_dense_replace", default=0) if experts else layers
        expert = row * _number(config, "moe_intermediate_size", default=inner)
        shared = _shared_experts(config, row, expert)
        kinds = _layer_types(config, layers)
        states = kinds.count("linear_attention")
        mixers = (layers - states) * attention + states * _mamba(config, width)
        active = _number(config, "num_experts_per_tok", "num_experts_per_token", default=1)
        plain = _bytes_of(dtype, config, whole)
        given = config.get("quantization_config") or whole.get("quantization_config")
        bits, eight_bits = _quantization(given, quantization)
        return cls(
            name=name,
            width=width,
            inner=inner,
            layers=layers,
            full_layers=kinds.count("full_attention"),
            heads=heads,
            head_dim=head_dim,
            parameters=mixers + dense * row * inner + (layers - dense) * shared,
            head_parameters=width * _number(config, "vocab_size"),
            expert_parameters=expert * (layers - dense),
            experts=experts,
            active_experts=active if experts else 0,
            kv_numbers=(layers - states) * kv_numbers,
            weight_bytes=bits / 8 if bits else plain,
            kv_bytes=1.0 if "8" in kv_cache_dtype else plain,
            eight_bits=eight_bits,
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through before the output projection."""
        return self.parameters + self.active_experts * self.expert_parameters

    @property
    def weights(self) -> float:
        """Bytes of all weights but the embeddings."""
        return self.weights_read(math.inf)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV per token, over all layers."""
        return self.kv_numbers * self.kv_bytes

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step with this many tokens reads: with experts, those that at
        least one token is sent to, if tokens choose evenly."""
        used = 0.0
        if self.experts:
            used = self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens)
        numbers = self.parameters + self.head_parameters + used * self.expert_parameters
        return numbers * self.weight_bytes


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        number = config.get(name)
        if number is not None:
            return int(number)
    if default is None:
        raise ValueError(f"the model's configuration lacks {names[0]}")
    return default


def _shared_experts(config: Mapping[str, Any], row: int, expert: int) -> int:
    """Parameters of a layer's experts that compute every token; `row`: of one inner neuron."""
    return (
        expert * _number(config, "n_shared_experts", default=0)
        + row * _number(config, "shared_expert_intermediate_size", default=0)
        + row * _number(config, "shared_intermediate_size", default=0)
    )


def _bytes_of(dtype: str | None, config: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
    """Bytes of a number, as given or else as the configuration says."""
    stated = dtype or config.get("dtype") or config.get("torch_dtype") or whole.get("dtype")
    return _BYTES.get(str(stated).removeprefix("torch."), 2.0)


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer, in the words of today's `transformers`."""
    given = config.get("layer_types") or config.get("layers_block_type") or ()
    today = {"attention": "full_attention", "mamba": "linear_attention"}
    if len(given) != layers:
        return ["full_attention"] * layers
    return [today.get(kind, kind) for kind in given]


def _mamba(config: Mapping[str, Any], width: int) -> int:
    """Parameters of a Mamba 2 layer: its two projections. Another layer with a state is taken for
    one."""
    inner = _number(config, "mamba_expand", default=2) * width
    heads = _number(config, "mamba_n_heads", default=inner // 64)
    groups = _number(config, "mamba_n_groups", default=1)
    state = _number(config, "mamba_d_state", default=128)
    return width * (2 * inner + 2 * groups * state + heads) + inner * width


def _latent_attention(
    config: Mapping[str, Any], width: int, heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Multi-head latent attention, with one compressed vector per token and layer: parameters and
    KV numbers per layer, and the width of a head."""
    latent = _number(config, "kv_lora_rank")
    rope = _number(config, "qk_rope_head_dim", default=64)
    nope = _number(config, "qk_nope_head_dim", default=head_dim)
    values = _number(config, "v_head_dim", default=nope)
    query = _number(config, "q_lora_rank", default=0)
    queries = heads * (nope + rope)
    parameters = width * query + query * queries if query else width * queries
    parameters += width * (latent + rope) + latent * heads * (nope + values)
    return parameters + heads * values * width, latent + rope, nope + rope


def _quantization(config: Any, option: str | None) -> tuple[int, bool]:
    """Bits per weight (0: not quantized), and whether activations have 8 bits as well."""
    config = config if isinstance(config, Mapping) else {}
    method = f"{config.get('quant_method', '')} {config.get('quant_algo', '')} {option or ''}"
    method = method.lower()
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        inputs = group.get("input_activations") or {}
        if weights.get("num_bits"):
            return int(weights["num_bits"]), inputs.get("num_bits") == 8
    bits = config.get("bits", config.get("w_bit"))
    if bits is not None:
        return int(bits), False
    if "fp8" in method:
        return 8, True
    if "int8" in method or config.get("load_in_8bit"):
        return 8, False
    if any(name in method for name in ("awq", "gptq", "fp4", "bitsandbytes")):
        return 4, False
    return 0, False
