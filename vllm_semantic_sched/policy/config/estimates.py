"""Keys about estimates: hints, predictor, level decision, output length."""

import itertools
import math
from typing import Literal

from pydantic import Field, PositiveFloat, field_validator

from vllm_semantic_sched.policy.config.section import Section


class Hints(Section):
    """How far the scheduler trusts clients' hints about their own requests."""

    urgency: Literal["honor", "cap", "ignore"] = "honor"
    """`vllm_xargs: {urgency: N}`: `honor` uses it, `cap` uses it but no more urgent than
    `most_urgent_level`, `ignore` does not read it."""
    priority: Literal["honor", "cap", "ignore", "vllm"] = "honor"
    """vLLM's own `priority` field and the X-Vllm-Priority header, when not 0 (vLLM cannot tell 0
    from unset). `honor`, `cap` and `ignore` read it as an urgency level, as in `urgency`. `vllm`
    keeps vLLM's meaning, the lowest number first: -1 is one level more urgent than `default_level`,
    1 one level less, and so on to the first and the last level."""
    most_urgent_level: int = Field(0, ge=0)
    """With `cap`: the most urgent level that a hint can claim."""


class Instant(Section):
    """The instant reader: a small linear model that gives each request a provisional level and
    length on arrival, until the predictor has read it."""

    enabled: bool = True
    """Off: requests wait for the predictor."""
    may: Literal["order", "start", "preempt"] = "preempt"
    """What a provisional level may do. `order`: only put the request in order for the predictor.
    `start`: also give it its place in the waiting queue, and so a free seat. `preempt`: also take
    the seat of a running request."""
    preempt_above: float = Field(0.9, gt=0, le=1)
    """`preempt`: the request preempts at level L only if P(level <= L) reaches this; never at a
    level more urgent than its provisional one."""

    @property
    def decides_place(self) -> bool:
        """Whether a provisional level decides a request's place in the waiting queue."""
        return self.enabled and self.may != "order"


class SecondLook(Section):
    """Reading parts of a request's prompt that its first reading did not see, while the predictor
    has no first readings to do."""

    enabled: bool = True
    """Off: each prompt is read once."""
    certain: float = Field(0.98, gt=0.5, le=1)
    """A part raises a request to level L only if its P(level <= L) reaches this; it never lowers
    one."""


class Predictor(Section):
    """The model that predicts urgency and output length from the prompt, in its own process."""

    enabled: bool = True
    """Off: levels come from hints only."""
    model: str | None = None
    """Local path or hub id of a transformers sequence classifier whose labels, in order, are the
    urgency levels. Unset: the model shipped with the package."""
    mode: Literal["immediate", "full_batching"] = "immediate"
    """`immediate` predicts as soon as requests arrive, `full_batching` waits for a full batch
    (paper, section 4.1)."""
    max_batch: int = Field(16, ge=1)
    """Most texts in one forward pass."""
    max_pass: float = Field(0.1, gt=0)
    """`immediate`: seconds that a forward pass may take, by the measured speed, so that an urgent
    request is not kept waiting for one in progress. At least one text."""
    max_wait: float = Field(0.05, ge=0)
    """`full_batching`: seconds after which an incomplete batch is predicted."""
    max_queue: int = Field(10_000, ge=1)
    """Texts that may wait for the predictor; requests beyond that run at the default level."""
    cache_size: int = Field(4096, ge=0)
    """Distinct prompts whose predictions are cached. 0: no cache."""
    timeout: float = Field(30.0, gt=0)
    """Seconds for one forward pass after which the predictor process counts as stuck and is
    restarted; its requests run at the default level."""
    extra_latency: float = Field(0.0, ge=0)
    """Seconds added to every batch, to measure the cost of a slower predictor."""
    threads: int = Field(1, ge=1)
    """CPU threads of the predictor process."""
    instant: Instant = Instant()
    second_look: SecondLook = SecondLook()


class Decision(Section):
    """How predicted probabilities of the levels become one level."""

    rule: Literal["least_cost", "most_likely", "thresholds"] = "thresholds"
    """`thresholds`: a level that is at least as probable as `certain`, else the expected level, cut
    at `thresholds`; `least_cost` for a model with another number of levels than these cut.
    `least_cost`: the lowest expected cost, where a mistake costs the levels it is off, times
    `missed_cost` if the request is more urgent than decided. `most_likely`: the most probable."""
    certain: float = Field(0.73, gt=0.5, le=1.01)
    """`thresholds`: minimum probability for using the most likely level directly; above 1, always
    use `thresholds`."""
    possible: tuple[PositiveFloat, PositiveFloat] = (0.2, 0.004)
    """`thresholds`: the predictor's probability of level 0 from which a request gets level 1 or 0,
    and that from which it never gets the last level, even if that is `certain`. Above 1: off."""
    missed_cost: tuple[float, ...] = Field((12.0, 6.0, 1.0), min_length=1)
    """`least_cost`: cost of serving a request one level too late, relative to 1 for one level too
    early; one number per true level, the last one for all further levels."""
    thresholds: tuple[float, ...] = Field((1.15, 2.06, 2.35, 2.9), min_length=1)
    """`thresholds`: the expected level (0 to 4, the mean of the prediction) below which a request
    gets level 0, level 1, and so on. One fewer than levels. The default fits emergency triage."""

    @field_validator("thresholds")
    @classmethod
    def _thresholds_ascend(cls, thresholds: tuple[float, ...]) -> tuple[float, ...]:
        ascending = all(low < high for low, high in itertools.pairwise(thresholds))
        if not (ascending and all(map(math.isfinite, thresholds))):
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
    """How predicted probabilities of output-length buckets become a number of tokens."""

    estimate: Estimate = "mean"
    """Point estimate of the output length; `p90` is the 90th percentile."""
    calibrate: bool = True
    """Adjust the mean lengths of the buckets to the answers of the served model."""
    default_tokens: int = Field(256, ge=1)
    """Output tokens assumed where no prediction is available."""
