"""Keys about what is expected of a request: hints, predictor, level decision, length."""

from __future__ import annotations

import itertools
import math
from typing import Literal

from pydantic import Field, field_validator

from vllm_semantic_sched.policy.facts.section import Section


class Hints(Section):
    """What a client may say about its own request: the trust boundary of the scheduler."""

    urgency: Literal["honour", "cap", "ignore"] = Field(
        "honour",
        description="`vllm_xargs: {urgency: N}`: use it, use it but no more urgent than "
        "`most_urgent_level`, or leave it unread.",
    )
    priority: Literal["honour", "cap", "ignore"] = Field(
        "honour",
        description="vLLM's own `priority` field and the X-Vllm-Priority header, read as an "
        "urgency level when not 0 (vLLM cannot tell 0 from unset); same choices as `urgency`.",
    )
    most_urgent_level: int = Field(
        0, ge=0, description="With `cap`: the most urgent level that a hint can claim."
    )


class Predictor(Section):
    """The model that reads urgency and output length from the prompt, beside the engine."""

    enabled: bool = Field(True, description="Off: levels come from hints only.")
    model: str | None = Field(
        None,
        description="Local path or hub id of a transformers sequence classifier whose labels, in "
        "order, are the urgency levels. Unset: the model shipped with the package.",
    )
    mode: Literal["immediate", "full_batching"] = Field(
        "immediate",
        description="Predict as soon as requests arrive, or wait for a full batch (paper, "
        "section 4.1).",
    )
    max_batch: int = Field(16, ge=1, description="Most texts in one forward pass.")
    max_wait: float = Field(
        0.05,
        ge=0,
        description="`full_batching`: seconds after which an incomplete batch goes anyway.",
    )
    max_queue: int = Field(
        10_000,
        ge=1,
        description="Texts that may wait for the predictor; requests beyond that run at the "
        "default level.",
    )
    cache_size: int = Field(
        4096,
        ge=0,
        description="Distinct prompts whose predictions are remembered; an identical prompt is "
        "answered from memory. 0: none.",
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds for one forward pass after which the predictor process counts as "
        "stuck and is started anew; its requests run at the default level.",
    )
    extra_latency: float = Field(
        0.0,
        ge=0,
        description="Seconds added to every batch: shows what a slower predictor would cost.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the predictor process.")


class Decision(Section):
    """From the predicted probabilities of the levels to one level."""

    rule: Literal["least_cost", "most_likely", "thresholds"] = Field(
        "least_cost",
        description="`least_cost`: the level with the lowest expected cost, where a mistake costs "
        "the number of levels it is off, times `missed_cost` if the request is more urgent than "
        "decided. `most_likely`: the most probable level, whatever mistakes cost. `thresholds`: "
        "the expected level, cut at `thresholds`; agrees best with nurses and finds fewer of the "
        "most urgent.",
    )
    missed_cost: tuple[float, ...] = Field(
        (12.0, 6.0, 1.0),
        min_length=1,
        description="`least_cost`: what it costs to serve a request one level too late, beside 1 "
        "for one level too early; one number per true level, the last one for all further levels.",
    )

    thresholds: tuple[float, ...] = Field(
        (0.56, 1.88, 2.38, 3.05),
        min_length=1,
        description="`thresholds`: the expected level (0 to 4, the mean under the predicted "
        "distribution) below which a request is of level 0, of level 1, and so on; from the last "
        "one on it is of the last level. The default fits the shipped model to emergency triage.",
    )

    @field_validator("thresholds")
    @classmethod
    def _thresholds_ascend(cls, thresholds: tuple[float, ...]) -> tuple[float, ...]:
        ascending = all(low < high for low, high in itertools.pairwise(thresholds))
        if not ascending or not all(map(math.isfinite, thresholds)):
            raise ValueError(f"decision.thresholds: {list(thresholds)} must be ascending numbers")
        return thresholds

    @field_validator("missed_cost")
    @classmethod
    def _costs_positive(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < cost < float("inf") for cost in costs):
            raise ValueError(f"decision.missed_cost: {list(costs)} must be numbers above 0")
        return costs


Estimate = Literal["mean", "median", "p90"]


class Length(Section):
    """How a predicted distribution over output-length buckets becomes a number of tokens."""

    estimate: Estimate = Field(
        "mean",
        description="Point estimate of the output length; `p90` is the length that nine requests "
        "in ten stay below.",
    )
    calibrate: bool = Field(
        True,
        description="Let the lengths that buckets stand for follow the answers of the served "
        "model.",
    )
    default_tokens: int = Field(
        256, ge=1, description="Output tokens assumed where no prediction is available."
    )
