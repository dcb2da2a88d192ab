"""Derives an engine profile from a model's configuration and a device's figures.

A step takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al.,
CACM 2009). `ProfileScale` corrects it by measured steps. Communication between devices is not
modeled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_semantic_sched.policy.profile.devices import Device
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape

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
_COPY_START = 1e-4  # seconds to start a copy between device and host
_USED_MEMORY = 0.9  # part of a device's memory that vLLM uses (--gpu-memory-utilization)
_TERA = 1e12
_GIGA = 1e9


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
        return self.step(Batch(prefills=1, prefill_tokens=tokens, prefill_squares=tokens * tokens))

    @property
    def per_square(self) -> float:
        """Seconds of attention per squared token of a prompt: two products of two operations for
        each earlier token, half of them masked."""
        operations = 2 * self.model.full_layers * self.model.heads * self.model.head_dim
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
        """The profile that comes closest; `source`: origin of the device's figures. Its terms are
        sums, so that a prefill whose arithmetic takes as long as reading the weights comes out too
        long, by at most a quarter."""
        model = self.model
        device = self.device
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
        fp8 = self.device.fp8 if self.model.eight_bits else None
        return self._rate(fp8 or self.device.bf16)

    @property
    def _bandwidth(self) -> float:
        """Bytes per second."""
        reached = 1 if self.device.measured else _BANDWIDTH
        return self.tensor_parallel * self.device.bandwidth * _GIGA * reached

    def _rate(self, peak: float) -> float:
        reached = 1 if self.device.measured else _ARITHMETIC
        return self.tensor_parallel * peak * _TERA * reached


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Start and slope, neither negative, of the line of least squared relative errors."""
    w = [1 / (y * y) for y in ys]
    sw = sum(w)
    sx = sum(a * x for a, x in zip(w, xs, strict=True))
    sy = sum(a * y for a, y in zip(w, ys, strict=True))
    sxx = sum(a * x * x for a, x in zip(w, xs, strict=True))
    sxy = sum(a * x * y for a, x, y in zip(w, xs, ys, strict=True))
    slope = max(0.0, (sw * sxy - sx * sy) / (sw * sxx - sx * sx))
    start = (sy - slope * sx) / sw
    if start > 0:
        return start, slope
    return min(ys) * 1e-3, sxy / sxx


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
