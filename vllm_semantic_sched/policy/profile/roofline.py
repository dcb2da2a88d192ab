"""Derives an engine profile from a model's configuration and a device's figures.

A step takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline
model: Williams et al., CACM 2009). No engine has to run: the result is the default profile of a
server, and serves for machines that one does not have. `ProfileScale` corrects it by measured
steps. Communication between devices is not modeled.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field

from vllm_semantic_sched.policy.facts.section import PolicyError, Section, parse_section
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile

# Shares of a device's peak figures that kernels reach. With `_OVERLAP`, `Device.layer` and
# `_ELEMENTWISE` they fit Vidur's kernel timings on A100 and H100 (docs/measurements/
# engine-profiles.md).
_ARITHMETIC = 0.65
_BANDWIDTH = 0.78
_HOST = 0.75
# Attention kernels reach this share of what matrix products do: by their papers, FlashAttention-2
# on A100 and 3 on H100 reach 50 to 60 % of the peak with causal masks and long prompts.
_ATTENTION = 0.8
# Arithmetic and memory traffic overlap partly: the p-norm of both, from 1 (not at all) to infinity
# (the classic roofline).
_OVERLAP = 1.5
# Bytes of norms and residual sums per token, layer and number of the hidden state: ten numbers read
# or written, in 16 bits. Every device of a tensor-parallel group does all of it.
_ELEMENTWISE = 20

# Decode batches that the straight line of `BatchTerms` is drawn through.
_BATCHES = tuple(2**n for n in range(9))

# Tokens of the prompt for which a profile counts the reading of experts.
_PROMPT = 128

# Seconds to start a copy between device and host.
_COPY_START = 1e-4
# Part of a device's memory that vLLM uses (--gpu-memory-utilization).
_USED_MEMORY = 0.9

_TERA, _GIGA = 1e12, 1e9
_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}
# Families whose feed-forward layers have two matrices; all newer ones have three.
_UNGATED = frozenset(
    {
        "bloom",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "mpt",
        "opt",
        "phi",
        "starcoder2",
    }
)


class Device(Section):
    """What an accelerator, or a processor, can do."""

    name: str = Field(description="Name in `--device`.")
    match: tuple[str, ...] = Field((), description="Words by which drivers name it.")
    bf16: float = Field(gt=0, description="TFLOP/s in 16 bits, dense.")
    fp8: float | None = Field(None, gt=0, description="TFLOP/s in 8 bits, if it has them.")
    memory: float = Field(gt=0, description="GB.")
    bandwidth: float = Field(gt=0, description="GB/s of its memory.")
    host: float = Field(gt=0, description="GB/s to or from the host, one direction.")
    step: float = Field(
        0.002, ge=0, description="Seconds per step for scheduling, inputs and sampling."
    )
    layer: float = Field(3e-5, ge=0, description="Seconds per layer and step for its kernels.")
    measured: bool = Field(
        False, description="The figures were reached in a benchmark; otherwise they are peaks."
    )


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a transformer that cost time.

    Attributes:
        name: of the model.
        width, inner: of the hidden state and of a feed-forward layer.
        layers, full_layers: all, and those whose attention sees the whole context.
        heads, head_dim: of the attention.
        parameters: those that every token passes through, without experts and embeddings.
        head_parameters: of the output projection; only sampled positions pass through it.
        expert_parameters: of one expert, over all layers; 0 without experts.
        experts, active_experts: per layer, and those that a token passes through.
        kv_numbers: numbers of KV per token, over all layers.
        weight_bytes, kv_bytes: bytes per number.
        eight_bits: whether products are computed in 8 bits.
    """

    name: str
    width: int
    inner: int
    layers: int
    full_layers: int
    heads: int
    head_dim: int
    parameters: int
    head_parameters: int
    expert_parameters: int
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
        quantization: str | None = None,
    ) -> Self:
        """The shape of a model by its `config.json`; `dtype` None: the configuration's.

        Raises:
            ValueError: a number is missing; names it.
        """
        whole, config = config, config.get("text_config") or config
        width = _number(config, "hidden_size", "n_embd", "d_model")
        layers = _number(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
        heads = _number(config, "num_attention_heads", "n_head", "n_heads")
        kv_heads = _number(config, "num_key_value_heads", "num_kv_heads", default=heads)
        head_dim = _number(config, "head_dim", default=width // heads)
        inner = _number(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        experts = _number(config, "num_local_experts", "n_routed_experts", "num_experts", default=0)
        matrices = 2 if config.get("model_type") in _UNGATED else 3
        attention = width * head_dim * (2 * heads + 2 * kv_heads)
        kv_numbers = 2 * kv_heads * head_dim
        if config.get("kv_lora_rank"):
            attention, kv_numbers, head_dim = _latent_attention(config, width, heads, head_dim)
        dense = _number(config, "first_k_dense_replace", default=0) if experts else layers
        expert, shared = _expert_parameters(config, inner, width * matrices)
        feed_forward = matrices * width * inner
        kinds = config.get("layer_types") or ()
        active = _number(config, "num_experts_per_tok", "num_experts_per_token", default=1)
        formats = _formats(whole, config, dtype, kv_cache_dtype, quantization)
        return cls(
            name=name,
            width=width,
            inner=inner,
            layers=layers,
            full_layers=kinds.count("full_attention") if len(kinds) == layers else layers,
            heads=heads,
            head_dim=head_dim,
            parameters=layers * attention + dense * feed_forward + (layers - dense) * shared,
            head_parameters=width * _number(config, "vocab_size"),
            expert_parameters=expert * (layers - dense),
            experts=experts,
            active_experts=active if experts else 0,
            kv_numbers=layers * kv_numbers,
            **formats,
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


@dataclass(frozen=True)
class Roofline:
    """Shortest times of a model on `tensor_parallel` devices, at the rates that engines reach."""

    model: ModelShape
    device: Device
    tensor_parallel: int = 1

    def step(self, batch: Batch) -> float:
        """Seconds of an engine step without copies between device and host."""
        model = self.model
        tokens = batch.prefill_tokens + batch.decodes
        numbers = tokens * model.active_parameters + batch.sequences * model.head_parameters
        arithmetic = 2 * numbers / self._arithmetic
        traffic = model.weights_read(tokens) / self._bandwidth
        return (
            self.device.step
            + model.layers * self.device.layer
            + math.pow(arithmetic**_OVERLAP + traffic**_OVERLAP, 1 / _OVERLAP)
            + self._elementwise * tokens
            + self.per_square * batch.prefill_squares
            + self.per_context_token * batch.context
        )

    def prefill(self, tokens: int) -> float:
        """Seconds to compute a prompt in one step on an idle engine."""
        batch = Batch()
        batch.add_prefill(0, tokens)
        return self.step(batch)

    @property
    def per_square(self) -> float:
        """Seconds of attention per squared token of a prompt: two products of two operations for
        each earlier token, half of them masked."""
        model = self.model
        operations = 2 * model.full_layers * model.heads * model.head_dim
        return operations / (self._rate(self.device.bf16) * _ATTENTION)

    @property
    def per_context_token(self) -> float:
        """Seconds to read the KV of one token that a decode attends to."""
        share = self.model.full_layers / self.model.layers
        return share * self.model.kv_bytes_per_token / self._bandwidth

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights; 0 if the weights do not fit."""
        memory = self.tensor_parallel * self.device.memory * _GIGA * _USED_MEMORY
        embeddings = self.model.head_parameters * self.model.weight_bytes
        free = memory - self.model.weights - embeddings
        return max(0, int(free / self.model.kv_bytes_per_token))

    def profile(self, source: str | None = None) -> EngineProfile:
        """The profile that comes closest. Its terms are sums, so that a prefill whose arithmetic
        takes as long as reading the weights comes out too long, by at most a quarter.

        Args:
            source: origin of the device's figures.
        """
        model, device = self.model, self.device
        host = self.tensor_parallel * device.host * _GIGA * (1 if device.measured else _HOST)
        steps = [self.step(Batch(decodes=size)) for size in _BATCHES]
        fixed, per_sequence = _line(_BATCHES, steps)
        copy = _rounded(model.kv_bytes_per_token / host)
        context = _rounded(self.per_context_token)
        per_token = 2 * model.active_parameters / self._arithmetic + self._elementwise
        # A prompt reaches nearly all experts, a decoding sequence few.
        experts = self.prefill(_PROMPT) - fixed - per_sequence - per_token * _PROMPT
        count = "" if self.tensor_parallel == 1 else f"{self.tensor_parallel} x "
        return EngineProfile(
            hardware=count + device.name,
            model=model.name,
            source=f"derived from the model's configuration and {source or 'peak figures'}",
            alpha1=_rounded(self.per_square),
            alpha2=_rounded(per_token),
            beta_load=copy,
            beta_save=copy,
            load_start=_COPY_START,
            save_start=_COPY_START,
            gamma1=context,
            gamma2=_rounded(steps[0]),
            batch=BatchTerms(
                step=_rounded(fixed),
                per_sequence=_rounded(per_sequence),
                per_prefill=_rounded(max(0.0, experts)) if model.experts else 0.0,
                per_context_token=context,
            ),
        )

    @property
    def _elementwise(self) -> float:
        """Seconds per token of norms and residual sums, which are not split between devices."""
        numbers = self.model.layers * self.model.width
        return _ELEMENTWISE * numbers * self.tensor_parallel / self._bandwidth

    @property
    def _arithmetic(self) -> float:
        """Operations per second."""
        device = self.device
        peak = device.fp8 if self.model.eight_bits and device.fp8 else device.bf16
        return self._rate(peak)

    @property
    def _bandwidth(self) -> float:
        """Bytes per second."""
        reached = 1 if self.device.measured else _BANDWIDTH
        return self.tensor_parallel * self.device.bandwidth * _GIGA * reached

    def _rate(self, peak: float) -> float:
        reached = 1 if self.device.measured else _ARITHMETIC
        return self.tensor_parallel * peak * _TERA * reached


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """The devices of devices.yaml, by name."""
    path = Path(__file__).with_name("devices.yaml")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = [parse_section(Device, row, path.name) for row in rows]
    return {device.name: device for device in found}


def device_named(name: str) -> Device:
    """A device of devices.yaml.

    Raises:
        PolicyError: there is none of that name; the message lists the names.
    """
    names = known_devices()
    if name.lower() in names:
        return names[name.lower()]
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise PolicyError(f"device {name!r} is not known.{hint} Known: {', '.join(names)}")


def recognize(driver_name: str) -> Device | None:
    """The device that a driver reports under this name (`NVIDIA H100 80GB HBM3`); None if it is
    not in devices.yaml."""
    words = {
        word: device
        for device in known_devices().values()
        for word in device.match
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", driver_name, re.IGNORECASE)
    }
    return words[max(words, key=len)] if words else None


def nearest_device(memory: float) -> Device:
    """The known accelerator whose memory is nearest to this many GB; of several, the slowest."""
    devices = [device for device in known_devices().values() if device.match]
    return min(devices, key=lambda one: (abs(math.log(one.memory / memory)), one.bf16))


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Start and slope of the straight line of least squared relative errors, both positive or
    zero."""
    w = [1 / (y * y) for y in ys]
    sw = sum(w)
    sx, sy = (sum(a * b for a, b in zip(w, values, strict=True)) for values in (xs, ys))
    sxx = sum(a * x * x for a, x in zip(w, xs, strict=True))
    sxy = sum(a * x * y for a, x, y in zip(w, xs, ys, strict=True))
    slope = max(0.0, (sw * sxy - sx * sy) / (sw * sxx - sx * sx))
    start = (sy - slope * sx) / sw
    return (start, slope) if start > 0 else (min(ys) * 1e-3, sxy / sxx)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _expert_parameters(config: Mapping[str, Any], inner: int, per_row: int) -> tuple[int, int]:
    """Parameters of one expert, and of those that all tokens share, in one layer."""
    expert = _number(config, "moe_intermediate_size", default=inner) * per_row
    shared = expert * _number(config, "n_shared_experts", default=0)
    return expert, shared + _number(config, "shared_expert_intermediate_size", default=0) * per_row


def _formats(
    whole: Mapping[str, Any],
    config: Mapping[str, Any],
    dtype: str | None,
    kv_cache_dtype: str,
    quantization: str | None,
) -> dict[str, Any]:
    """Bytes of a weight and of a KV number, and whether products are of eight bits."""
    given = config.get("quantization_config") or whole.get("quantization_config")
    scheme = _quantization(given, quantization)
    stated = dtype or config.get("dtype") or config.get("torch_dtype") or whole.get("dtype")
    plain = _BYTES.get(str(stated).removeprefix("torch."), 2.0)
    return {
        "weight_bytes": plain if scheme is None else scheme[0] / 8,
        "kv_bytes": 1.0 if "8" in kv_cache_dtype else plain,
        "eight_bits": scheme is not None and scheme[1],
    }


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    if default is None:
        raise ValueError(f"the model's configuration lacks {names[0]}")
    return default


def _latent_attention(
    config: Mapping[str, Any], width: int, heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Multi-head latent attention, which keeps one compressed vector per token and layer:
    parameters and KV numbers per layer, and the width of a head."""
    latent = _number(config, "kv_lora_rank")
    rope = _number(config, "qk_rope_head_dim", default=64)
    nope = _number(config, "qk_nope_head_dim", default=head_dim)
    values = _number(config, "v_head_dim", default=nope)
    query = _number(config, "q_lora_rank", default=0)
    queries = heads * (nope + rope)
    parameters = (
        (width * query + query * queries if query else width * queries)
        + width * (latent + rope)
        + latent * heads * (nope + values)
        + heads * values * width
    )
    return parameters, latent + rope, nope + rope


def _quantization(config: Any, option: str | None) -> tuple[int, bool] | None:
    """Bits per weight, and whether activations have 8 bits as well; None if the model is not
    quantized."""
    config = config if isinstance(config, Mapping) else {}
    method = f"{config.get('quant_method', '')} {config.get('quant_algo', '')} {option or ''}"
    method = method.lower()
    for group in (config.get("config_groups") or {}).values():
        weights, inputs = (group.get(part) or {} for part in ("weights", "input_activations"))
        if weights.get("num_bits"):
            return int(weights["num_bits"]), inputs.get("num_bits") == 8
    if (bits := config.get("bits", config.get("w_bit"))) is not None:
        return int(bits), False
    if "fp8" in method:
        return 8, True
    if "int8" in method or config.get("load_in_8bit"):
        return 8, False
    if any(name in method for name in ("awq", "gptq", "fp4", "bitsandbytes")):
        return 4, False
    return None
