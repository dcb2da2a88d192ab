"""What a scenario file holds: every key, its default and its meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.facts.profile import BatchTerms
from vllm_semantic_sched.policy.facts.section import Section
from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.sim.routing import Routing

_LENGTH_NEEDS = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma"),
    "empirical": ("values",),
}


class Lengths(Section):
    """A distribution of lengths in tokens; never below 1."""

    kind: Literal["constant", "uniform", "lognormal", "empirical"] = Field(
        "constant",
        description="`constant` (value), `uniform` (low to high, both included), `lognormal` "
        "(median, sigma) or `empirical` (values, drawn with equal chance).",
    )
    value: int | None = Field(None, ge=1, description="`constant`: tokens.")
    low: int | None = Field(None, ge=1, description="`uniform`: shortest.")
    high: int | None = Field(None, ge=1, description="`uniform`: longest.")
    median: float | None = Field(None, gt=0, description="`lognormal`: median in tokens.")
    sigma: float | None = Field(None, ge=0, description="`lognormal`: spread of the logarithm.")
    values: tuple[int, ...] = Field((), description="`empirical`: lengths that were seen.")
    most: int = Field(8192, ge=1, description="Longer draws are cut to this.")

    @model_validator(mode="after")
    def _complete(self) -> Lengths:
        missing = [name for name in _LENGTH_NEEDS[self.kind] if not getattr(self, name)]
        if self.kind == "lognormal" and self.sigma == 0:
            missing = [name for name in missing if name != "sigma"]
        if missing:
            raise ValueError(f"lengths of kind {self.kind} need {' and '.join(missing)}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"lengths: low {self.low} is above high {self.high}")
        return self


class WorkloadModel(Section):
    """Who asks for what, and when."""

    arrivals: Literal["bursts", "poisson", "gamma", "jsonl", "azure"] = Field(
        "bursts",
        description="`bursts`: every `gap` seconds 0 to `max_burst` requests at once (paper, "
        "section 4). `poisson`, `gamma`: `rate` requests per second on average. `jsonl`, `azure`: "
        "replay of a recorded trace.",
    )
    requests: int | None = Field(
        None, ge=1, description="How many; of a trace: the first ones, unset for all."
    )
    bursts: int | None = Field(
        None, ge=1, description="`bursts`: how many bursts, instead of `requests`."
    )
    gap: float = Field(1.0, gt=0, description="`bursts`: seconds between bursts.")
    max_burst: int = Field(5, ge=1, description="`bursts`: most requests in one.")
    rate: float = Field(1.0, gt=0, description="`poisson`, `gamma`: requests per second.")
    cv: float = Field(
        2.0,
        gt=0,
        description="`gamma`: coefficient of variation of the gaps; 1 is Poisson, more is "
        "burstier.",
    )
    path: str | None = Field(
        None,
        description="`jsonl`: a file with one object per line: `arrival` (s), `prompt_tokens`, "
        "`output_tokens` and, if known, `level`. `azure`: `conv` or `code`.",
    )
    speed: float = Field(
        1.0, gt=0, description="All arrivals come this many times as fast: the load in one number."
    )
    prompt: Lengths = Lengths(value=128)
    output: Lengths = Lengths(value=128)
    mix: tuple[float, ...] = Field(
        (),
        description="Weights of the levels, most urgent first; unset: all alike. Traces with "
        "levels keep theirs.",
    )
    hints: bool = Field(
        False, description="Clients state the true level (`vllm_xargs: {urgency: N}`)."
    )
    limits: bool = Field(
        False,
        description="Clients limit their answers to the length that they come to have "
        "(`max_tokens`), which tells a policy that length. Otherwise all have one limit.",
    )

    @model_validator(mode="after")
    def _complete(self) -> WorkloadModel:
        if self.arrivals in ("jsonl", "azure") and not self.path:
            raise ValueError(f"workload.path: arrivals of kind {self.arrivals} need it")
        if self.arrivals == "azure" and self.path not in ("conv", "code"):
            raise ValueError(
                f"workload.path: {self.path!r} is not an Azure trace; valid: conv, code"
            )
        counted = self.requests is not None or (
            self.arrivals == "bursts" and self.bursts is not None
        )
        if self.arrivals in ("bursts", "poisson", "gamma") and not counted:
            raise ValueError("workload.requests: say how many requests arrive")
        if self.mix and (min(self.mix) < 0 or sum(self.mix) <= 0):
            raise ValueError(f"workload.mix: {list(self.mix)} must be weights with a positive sum")
        return self


class PredictorModel(Section):
    """How good and how fast the predictor is. Its mode and batch size are the policy's."""

    latency: float = Field(0.003, ge=0, description="Seconds for one batch.")
    latency_per_request: float = Field(0.0, ge=0, description="Seconds more per text in it.")
    urgency_error: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Error rate of the level as the paper defines it (section 4.1): that share "
        "is wrong, and by that share of the number of levels on average.",
    )
    length_error: float = Field(
        0.0, ge=0, le=1, description="The same for the output-length bucket."
    )
    mistakes: Literal["inside", "clipped"] = Field(
        "inside",
        description="Where a mistake would go beyond the first or last class: `inside` it goes the "
        "other way, so that the error rate holds at the ends as well; `clipped` it stops there, "
        "and half the mistakes about the most urgent level are none.",
    )
    confusion: tuple[tuple[float, ...], ...] = Field(
        (),
        description="Instead of `urgency_error`: one row per true level, weights of the levels "
        "predicted for it.",
    )
    confusion_report: str | None = Field(
        None, description="Instead: the report.json of `semsched evaluate` that holds the matrix."
    )
    buckets: int = Field(5, ge=1, description="Output-length buckets of equal width.")
    bucket_edges: tuple[int, ...] = Field(
        (), description="Instead: the inner edges of the buckets, in tokens."
    )
    hold: bool = Field(
        False,
        description="Queue a request only when its prediction is there, as the authors' simulator "
        "does. Otherwise it may run at the default level before that, as in the engine.",
    )


class EngineModel(Section):
    """The engine that is simulated."""

    kind: Literal["paper", "vllm"] = Field(
        "vllm",
        description="`paper`: whole prompts, a step lasts as long as its slowest sequence takes "
        "by the profile. `vllm`: token budget, chunked prefill, KV blocks, and step seconds as a "
        "sum of the profile's terms.",
    )
    profile: str = Field(
        "a100-qwen1.5-4b",
        description="Engine profile by name or path: what work takes in the simulation.",
    )
    assumed_profile: str | None = Field(
        None, description="What the policies take it for; unset: the same."
    )
    seats: int = Field(
        16, ge=1, description="Sequences in a step at most (the paper's batch size)."
    )
    token_budget: int = Field(2048, ge=1, description="`vllm`: tokens in a step at most.")
    block_size: int = Field(16, ge=1, description="Tokens in a KV block.")
    kv_blocks: int | None = Field(None, ge=1, description="KV blocks; unset: they never run out.")
    swap: bool = Field(
        False, description="Victims' KV may go to the host, as the policy's `retention` has it."
    )
    host_blocks: int | None = Field(
        None, ge=0, description="`swap`: KV blocks that the host takes; unset: any number."
    )
    batch: BatchTerms | None = Field(
        None, description="`vllm`: terms of a step in place of the profile's."
    )
    arrival: float = Field(
        0.0, ge=0, description="Seconds of the engine's time that taking in a request costs."
    )
    replicas: int = Field(
        1, ge=1, description="Independent engines, each with its own queue and predictor."
    )
    routing: Routing = Field(
        "least_loaded",
        description="Which of several engines a request goes to: `round_robin`, `least_loaded` "
        "(fewest requests) or `urgency_aware` (fewest that are at least as urgent).",
    )


class Settings(Section):
    """A whole scenario file."""

    description: str = Field("", description="Shown above the table.")
    seed: int = Field(0, ge=0, description="Of the random numbers; the same gives the same bytes.")
    repeats: int = Field(
        1, ge=1, description="Runs per cell, with the seeds from `seed` on; results are their mean."
    )
    workload: WorkloadModel
    predictor: PredictorModel = PredictorModel()
    engine: EngineModel = EngineModel()
    schedulers: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="Name: policy file content, or `{policy: NAME OR PATH}` with the keys that "
        "differ from it.",
    )
    overrides: dict[str, Any] = Field(
        {}, description="Policy keys set for all schedulers but `fcfs`."
    )
    slos: tuple[Slo, ...] = Field(
        (),
        description="What each level is promised, under all schedulers: one entry per level. "
        "Unset: what the tiers of each scheduler's policy promise.",
    )
    sweep: tuple[dict[str, tuple[Any, ...]], ...] = Field(
        (),
        description="Axes, of which every combination is run. An axis maps fields "
        "(`workload.max_burst`) to their values; several fields on one axis change together.",
    )
