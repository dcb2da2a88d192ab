"""Derives an engine profile from a model's configuration and a device's peak figures.

A step takes as long as its arithmetic or its memory traffic (Williams et al., 2009): prefills are
bound by arithmetic, decodes by reading the weights once for all sequences and each sequence's KV.
No engine runs, so it serves as the default, and for machines that one does not have. The running
correction (`policy.estimates.profile_scale`) removes what the constants miss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field

from vllm_semantic_sched.policy.facts.profile import BatchTerms, EngineProfile
from vllm_semantic_sched.policy.facts.section import Section

# Shares of the peaks that engines reach; of arithmetic for long prefills.
_ARITHMETIC = 0.6
_ATTENTION = 0.4
_BANDWIDTH = 0.75
_HOST = 0.75

_TERA, _GIGA = 1e12, 1e9
_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}
_DEFAULT_BYTES = 2.0


class Device(Section):
    """What an accelerator can do at most."""

    name: str = Field(description="Name in `--device`.")
    match: list[str] = Field([], description="Names by which drivers report it.")
    bf16: float = Field(gt=0, description="TFLOP/s, dense.")
    fp8: float | None = Field(None, gt=0, description="TFLOP/s in 8 bits, where it has them.")
    memory: float = Field(gt=0, description="GB.")
    bandwidth: float = Field(gt=0, description="GB/s of its memory.")
    host: float = Field(gt=0, description="GB/s to or from the host, one direction.")
    step: float = Field(
        0.002, ge=0, description="Seconds per step for scheduling, launches and sampling."
    )


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a transformer that cost time.

    Attributes:
        name: of the model.
        layers, heads, head_dim: of the attention.
        parameters: those that every token passes through outside experts, embeddings excluded.
        expert_parameters: of one expert, over all layers; 0 without experts.
        experts, active_experts: per layer, and those that a token passes through.
        kv_numbers: numbers of KV per token, over all layers.
        weight_bytes, kv_bytes: bytes per number.
        eight_bits: whether products are computed in 8 bits.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    parameters: float
    expert_parameters: float
    experts: int
    active_experts: int
    kv_numbers: int
    weight_bytes: float
    kv_bytes: float
    eight_bits: bool

    @classmethod
    def from_config(
        cls,
        name: str,
        config: Mapping[str, Any],
        dtype: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> Self:
        """The shape of a model by its `config.json`.

        Args:
            dtype: of weights and activations; None: the configuration's.
            kv_cache_dtype: vLLM's option.

        Raises:
            ValueError: a number is missing; names it.
        """
        config = config.get("text_config", config)
        width = _number(config, "hidden_size", "n_embd", "d_model")
        layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
        heads = _number(config, "num_attention_heads", "n_head")
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or width // heads)
        inner = int(config.get("intermediate_size") or config.get("n_inner") or 4 * width)
        vocabulary = _number(config, "vocab_size")
        gated = 2 if config.get("model_type") in ("gpt2", "opt", "gpt_neox", "phi") else 3
        latent = config.get("kv_lora_rank")
        if latent:  # multi-head latent attention keeps one compressed vector per token
            rope = int(config.get("qk_rope_head_dim", 64))
            nope = int(config.get("qk_nope_head_dim", head_dim))
            values = int(config.get("v_head_dim", nope))
            query = int(config.get("q_lora_rank") or 0)
            queries = heads * (nope + rope)
            attention = (
                (width * query + query * queries if query else width * queries)
                + width * (latent + rope)
                + latent * heads * (nope + values)
                + heads * values * width
            )
            kv_numbers = layers * (latent + rope)
            head_dim = nope + rope
        else:
            attention = width * head_dim * (2 * heads + 2 * kv_heads)
            kv_numbers = 2 * layers * kv_heads * head_dim
        experts = int(
            config.get("num_local_experts")
            or config.get("n_routed_experts")
            or config.get("num_experts")
            or 0
        )
        dense_layers = int(config.get("first_k_dense_replace") or 0) if experts else layers
        expert_layers = layers - dense_layers
        expert = int(config.get("moe_intermediate_size") or inner) * width * gated
        shared = int(config.get("n_shared_experts") or 0) * expert
        parameters = (
            layers * attention
            + dense_layers * gated * width * inner
            + expert_layers * shared
            + width * vocabulary
        )
        bits = _weight_bits(config.get("quantization_config"))
        plain = _BYTES.get(
            str(dtype or config.get("dtype") or config.get("torch_dtype")), _DEFAULT_BYTES
        )
        return cls(
            name=name,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            parameters=float(parameters),
            expert_parameters=float(expert * expert_layers if experts else 0),
            experts=experts,
            active_experts=int(config.get("num_experts_per_tok") or 0) if experts else 0,
            kv_numbers=kv_numbers,
            weight_bytes=plain if bits is None else bits / 8,
            kv_bytes=1.0 if kv_cache_dtype.startswith("fp8") else plain,
            eight_bits=bits == 8,
        )

    @property
    def active_parameters(self) -> float:
        """Parameters that one token passes through."""
        return self.parameters + self.active_experts * self.expert_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV per token, over all layers."""
        return self.kv_numbers * self.kv_bytes


def derived_profile(
    model: ModelShape, device: Device, tensor_parallel: int = 1
) -> EngineProfile:
    """The profile of a model on `tensor_parallel` devices.

    Small steps read the weights once (`step`), and with experts those that a token is sent to; each
    further sequence reads further experts until all are in use. Each token costs its arithmetic.
    """
    peak = device.fp8 if model.eight_bits and device.fp8 else device.bf16
    arithmetic = tensor_parallel * peak * _TERA * _ARITHMETIC
    bandwidth = tensor_parallel * device.bandwidth * _GIGA * _BANDWIDTH
    host = tensor_parallel * device.host * _GIGA * _HOST
    per_token = 2 * model.active_parameters / arithmetic
    weights = model.active_parameters * model.weight_bytes / bandwidth
    # Half of the experts that are not used yet are new ones, on average, until all are in use.
    other_experts = 0.0
    if model.experts:
        idle = model.experts - model.active_experts
        unread = idle * model.expert_parameters * model.weight_bytes / bandwidth
        other_experts = unread / max(1, model.experts // max(1, model.active_experts))
    per_context_token = model.kv_bytes_per_token / bandwidth
    # Scores and values: 2 products of 2 operations for each earlier token; their number grows
    # with the square of the prompt, halved by causality.
    squared = 2 * model.layers * model.heads * model.head_dim
    squared /= tensor_parallel * device.bf16 * _TERA * _ATTENTION
    step = device.step + weights
    return EngineProfile(
        hardware=device.name if tensor_parallel == 1 else f"{tensor_parallel} x {device.name}",
        model=model.name,
        source="derived from the model's configuration and the device's peak figures",
        alpha1=squared,
        alpha2=per_token,
        beta_load=model.kv_bytes_per_token / host,
        beta_save=model.kv_bytes_per_token / host,
        load_start=0.0001,
        save_start=0.0001,
        gamma1=per_context_token,
        gamma2=step + per_token,
        batch=BatchTerms(
            step=step,
            per_sequence=per_token + other_experts,
            per_context_token=per_context_token,
        ),
    )


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise ValueError(f"the model's configuration lacks {names[0]}")


def _weight_bits(quantisation: Any) -> int | None:
    """Bits per weight of a quantised model; None if it is not quantised."""
    if not isinstance(quantisation, Mapping):
        return None
    if (bits := quantisation.get("bits")) is not None:
        return int(bits)
    method = str(quantisation.get("quant_method", ""))
    if "fp8" in method or "int8" in method or quantisation.get("load_in_8bit"):
        return 8
    if method in ("awq", "gptq", "mxfp4", "bitsandbytes", "nvfp4"):
        return 4
    for group in (quantisation.get("config_groups") or {}).values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("num_bits"):
            return int(weights["num_bits"])
    return None
