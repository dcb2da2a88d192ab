"""The engine profile: seconds of engine work for one model on one engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field

from vllm_semantic_sched.policy.config import AUTO
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.section import Section, parse_section

_WITHOUT_ENGINE = "default"  # stands for it where there is no engine


class BatchTerms(Section):
    """Costs of a step of a batching engine besides the prefilled tokens."""

    step: float = Field(gt=0)  # seconds
    per_sequence: float = Field(0.0, ge=0)  # seconds per sequence, decoding or in prefill
    per_prefill: float = Field(0.0, ge=0)  # further seconds per sequence in prefill
    per_context_token: float = Field(0.0, ge=0)  # seconds per token of all decoding sequences
    # Seconds of a step of 1, 2, 4, 8 ... sequences without their context; used in place of `step`
    # and `per_sequence`.
    steps: tuple[float, ...] = ()

    def sequences(self, count: int) -> float:
        """Seconds of a step of so many sequences, without context and prefilled tokens: linear
        between the entries of `steps`, and beyond the last one."""
        steps = self.steps
        if not steps or not count:
            return self.step + self.per_sequence * count
        if len(steps) == 1:
            return steps[0] + self.per_sequence * (count - 1)
        lower = min(count.bit_length(), len(steps) - 1) - 1
        start = 1 << lower
        return steps[lower] + (count - start) * (steps[lower + 1] - steps[lower]) / start


@dataclass(slots=True)
class Batch:
    """The sequences of one step, summed up."""

    prefills: int = 0  # sequences in prefill
    prefill_tokens: int = 0  # tokens computed for them
    prefill_squares: int = 0  # sum of end^2 - start^2 over them, in tokens squared
    decodes: int = 0  # decoding sequences
    context: int = 0  # their tokens together
    loads: int = 0  # sequences whose KV comes from the host before the step
    loaded: int = 0  # their tokens
    saves: int = 0  # sequences whose KV goes to the host before the step
    saved: int = 0  # their tokens

    @property
    def sequences(self) -> int:
        """Sequences that compute something in this step."""
        return self.prefills + self.decodes

    def add_prefill(self, start: int, end: int) -> None:
        """Add a sequence that computes its tokens `start` to `end`."""
        self.prefills += 1
        self.prefill_tokens += end - start
        self.prefill_squares += end * end - start * start

    def add_decode(self, context: int) -> None:
        """Add a sequence of `context` tokens that decodes the next one."""
        self.decodes += 1
        self.context += context

    def add_load(self, tokens: int) -> None:
        """Add a load of the KV of this many tokens."""
        self.loads += tokens > 0
        self.loaded += tokens

    def add_save(self, tokens: int) -> None:
        """Add a save of the KV of this many tokens."""
        self.saves += tokens > 0
        self.saved += tokens


class Ranges(Section):
    """Smallest and largest values at which a profile was measured."""

    prefill_tokens: tuple[int, int]  # lengths of prefills
    decode_context: tuple[int, int]  # tokens of a decoding sequence
    decode_batch: tuple[int, int]  # decoding sequences in a step
    transfer_tokens: tuple[int, int]  # tokens saved or loaded at once


class Residual(Section):
    """Relative error of a fit."""

    points: int  # measured
    median: float  # of |fitted - measured| / measured
    p90: float  # 90th percentile of the same


class Environment(Section):
    """Conditions of a measurement. A profile without them was not measured by this project."""

    date: str  # ISO date and time, UTC
    vllm: str  # version
    torch: str  # version
    device: str  # cpu, cuda
    dtype: str  # of weights and activations
    kv_dtype: str
    block_size: int  # tokens in a KV block
    kv_bytes_per_token: int  # on all layers
    token_budget: int  # max_num_batched_tokens: most tokens in a step
    max_model_len: int  # longest sequence that the engine accepted
    options: str  # of the engine, as given
    statistic: str  # over the repeats of a point


class EngineProfile(Section):
    """Coefficients of one model on one engine (paper, section 3.3 and appendix B)."""

    hardware: str
    model: str
    source: str  # origin of the figures, and corrections
    alpha1: float = Field(ge=0)  # prefill, seconds per token squared
    alpha2: float = Field(gt=0)  # prefill, seconds per token
    beta_load: float = Field(gt=0)  # host to device, seconds per token
    beta_save: float = Field(gt=0)  # device to host, seconds per token
    gamma1: float = Field(ge=0)  # decode, seconds per token of context
    gamma2: float = Field(gt=0)  # decode, seconds per step
    load_start: float = Field(0.0, ge=0)  # fixed seconds per load
    save_start: float = Field(0.0, ge=0)  # fixed seconds per save
    batch: BatchTerms | None = None  # of a batching engine; unset: a step takes gamma2
    ranges: Ranges | None = None
    residuals: dict[str, Residual] = Field({})  # errors of the fits, by kind
    environment: Environment | None = None

    @property
    def batch_terms(self) -> BatchTerms:
        """Terms of a batching engine, as measured or from gamma2."""
        return self.batch or BatchTerms(step=self.gamma2)

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute tokens `start` to `end` of a sequence in one pass."""
        return self.alpha1 * (end * end - start * start) + self.alpha2 * (end - start)

    def load(self, tokens: int) -> float:
        """Seconds to load the KV of this many tokens from the host."""
        return self.load_start + self.beta_load * tokens if tokens else 0.0

    def save(self, tokens: int) -> float:
        """Seconds to save the KV of this many tokens to the host."""
        return self.save_start + self.beta_save * tokens if tokens else 0.0

    def decode(self, context: int, tokens: float) -> float:
        """Seconds to decode `tokens` after `context` tokens, one per step (eq. 4)."""
        return self.gamma1 * tokens * (context + (tokens + 1) / 2) + self.gamma2 * tokens

    def step(self, batch: Batch) -> float:
        """Seconds for a step of a batching engine, with the transfers before it."""
        return self.step_prefill(batch) + self.step_decode(batch) + self.step_transfer(batch)

    def step_prefill(self, batch: Batch) -> float:
        """The part of `step` for prefills and their tokens."""
        start = self.batch_terms.per_prefill * batch.prefills
        return start + self.alpha1 * batch.prefill_squares + self.alpha2 * batch.prefill_tokens

    def step_decode(self, batch: Batch) -> float:
        """The part of `step` for the step itself, its sequences and their context."""
        terms = self.batch_terms
        return terms.sequences(batch.sequences) + terms.per_context_token * batch.context

    def step_transfer(self, batch: Batch) -> float:
        """The part of `step` for copies between device and host."""
        load = self.load_start * batch.loads + self.beta_load * batch.loaded
        return load + self.save_start * batch.saves + self.beta_save * batch.saved

    def prefill_alone(self, tokens: int, token_budget: int | None = None) -> float:
        """Seconds for a prefill on an idle engine. `token_budget`: most tokens in a step, by
        default that of the measured engine."""
        measured = self.environment.token_budget if self.environment else tokens
        steps = -(-tokens // (token_budget or measured))
        seconds_per_step = self.batch_terms.sequences(1) + self.batch_terms.per_prefill
        return steps * seconds_per_step + self.prefill(0, tokens)

    def scaled(
        self, prefill: float, decode: float, load: float, batch: BatchTerms | None = None
    ) -> EngineProfile:
        """A copy with times multiplied by kind of work; `batch`: in place of multiplied terms."""
        given = self.batch
        if batch is None and given is not None:
            batch = BatchTerms(
                step=given.step * decode,
                per_sequence=given.per_sequence * decode,
                per_prefill=given.per_prefill * prefill,
                per_context_token=given.per_context_token * decode,
                steps=tuple(seconds * decode for seconds in given.steps),
            )
        changes = {
            "alpha1": self.alpha1 * prefill,
            "alpha2": self.alpha2 * prefill,
            "gamma1": self.gamma1 * decode,
            "gamma2": self.gamma2 * decode,
            "beta_load": self.beta_load * load,
            "beta_save": self.beta_save * load,
            "load_start": self.load_start * load,
            "save_start": self.save_start * load,
            "batch": batch,
        }
        return self.model_copy(update=changes)

    def warnings(self, max_model_len: int) -> list[str]:
        """Warnings about using this profile for an engine with this context length."""
        if self.environment is None:
            return [
                f"the engine profile in use ({self.hardware}, {self.model}) was not measured on "
                "this engine. Measure one with `semsched profile --output my.yaml -- MODEL "
                "[OPTIONS]` and name it as semantic_sched.profile in --additional-config"
            ]
        warning = self.beyond_range(max_model_len)
        return [] if warning is None else [warning]

    def beyond_range(self, max_model_len: int) -> str | None:
        """A warning if an engine accepts longer sequences than were measured; else None."""
        ranges = self.ranges
        if ranges is None:
            return None
        lengths = (ranges.prefill_tokens, ranges.decode_context, ranges.transfer_tokens)
        measured = min(longest for _, longest in lengths)
        if max_model_len <= 1.1 * measured:  # slightly longer does not matter
            return None
        return (
            f"the engine profile was measured up to {measured} tokens and max_model_len is "
            f"{max_model_len}: costs of longer sequences are extrapolated"
        )


def load_profile(name_or_path: str | Path) -> EngineProfile:
    """Read a profile by the name of a shipped one or by path; PolicyError if it is missing or
    invalid. `auto` is `default` here: only an engine knows its model and device."""
    name_or_path = _WITHOUT_ENGINE if name_or_path == AUTO else name_or_path
    data, source = read_config(name_or_path, kind="profile")
    return parse_section(EngineProfile, data, source)


def write_profile(profile: EngineProfile, path: Path) -> None:
    """Write a profile that `load_profile` reads. OSError if the file cannot be written."""
    content = profile.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=100), encoding="utf-8")
