"""The keys of a scenario file, with defaults and meanings."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.config.section import Section
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.prediction import MAX_BATCH
from vllm_semantic_sched.policy.profile.formula import BatchTerms

Routing = Literal["round_robin", "least_loaded", "urgency_aware"]
"""`urgency_aware` is the policy's `Placement`; see `EngineModel.routing`."""

_LENGTH_NEEDS = {
    "constant": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma"),
}


class Lengths(Section):
    """A distribution of lengths in tokens, at least 1."""

    kind: Literal["constant", "uniform", "lognormal"] = "constant"
    """`constant` (value), `uniform` (low to high, both included) or `lognormal` (median, sigma)."""
    value: int | None = Field(None, ge=1)
    """`constant`: tokens."""
    low: int | None = Field(None, ge=1)
    """`uniform`: shortest."""
    high: int | None = Field(None, ge=1)
    """`uniform`: longest."""
    median: float | None = Field(None, gt=0)
    """`lognormal`: median in tokens."""
    sigma: float | None = Field(None, ge=0)
    """`lognormal`: spread of the logarithm."""
    most: int = Field(8192, ge=1)
    """Longer lengths are cut to this."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        missing = [name for name in _LENGTH_NEEDS[self.kind] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"lengths of kind {self.kind} need {' and '.join(missing)}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"lengths: low {self.low} is above high {self.high}")
        return self


class Reuse(Section):
    """Prompts that begin alike, where the engine has a prefix cache."""

    beginnings: int = Field(0, ge=0)
    """Shared beginnings of prompts, such as system prompts; each session has one. 0: none."""
    beginning: Lengths = Lengths(value=512)
    """Tokens of each, before those of `workload.prompt`."""
    turns: int = Field(1, ge=1)
    """Requests of a session, on average. Each prompt continues the last one and its answer by the
    tokens of `workload.prompt`."""
    spread: float = Field(0.0, ge=0)
    """Spread of the logarithm of the number of turns; 0: all sessions have as many."""
    pause: float = Field(20.0, gt=0)
    """Mean seconds from one turn of a session to the next, exponential."""
    closed: bool = False
    """A turn comes `pause` after the answer to the one before, as in a program that needs it,
    instead of after its arrival. All turns of each session are run."""


class WorkloadModel(Section):
    """Arrivals, lengths and levels of the requests."""

    arrivals: Literal["bursts", "poisson", "gamma", "jsonl", "azure"] = "bursts"
    """`bursts`: 0 to `max_burst` requests every `gap` seconds (paper, section 4). `poisson`,
    `gamma`: `rate` requests per second. `jsonl`, `azure`: a recorded trace."""
    requests: int | None = Field(None, ge=1)
    """Number of requests. Of a trace the first ones; unset: all."""
    bursts: int | None = Field(None, ge=1)
    """`bursts`: number of bursts, instead of `requests`."""
    gap: float = Field(1.0, gt=0)
    """`bursts`: seconds between bursts."""
    max_burst: int = Field(5, ge=1)
    """`bursts`: most requests in a burst."""
    rate: float = Field(1.0, gt=0)
    """`poisson`, `gamma`: requests per second."""
    cv: float = Field(2.0, gt=0)
    """`gamma`: coefficient of variation of gaps; 1: Poisson, >1: bursty."""
    path: str | None = None
    """`jsonl`: a file with one object per line: `arrival` (s), `prompt_tokens`, `output_tokens`
    and, if known, `level`, `deadline` (s from arrival) and `hash_ids` (one id for each 512 tokens
    of the prompt and all before them); or in the form of Mooncake's traces: `timestamp` (ms),
    `input_length`, `output_length` and `hash_ids`. `azure`: `conv` or `code`."""
    speed: float = Field(1.0, gt=0)
    """Factor on the load: all arrivals come this many times as fast."""
    prompt: Lengths = Lengths(value=128)
    output: Lengths = Lengths(value=128)
    mix: tuple[float, ...] = ()
    """Weights of levels, most urgent first, unless a trace has them; unset: equal."""
    reuse: Reuse = Reuse()
    tenants: tuple[float, ...] = ()
    """Weights of the tenants; unset: requests have no tenant."""
    deadlines: tuple[tuple[float, float], ...] = ()
    """Shortest and longest deadline of an answer, seconds from arrival, per level; drawn evenly.
    Clients state them (`vllm_xargs: {deadline_ms: N}`). Unset: none, unless a trace has them
    (`deadline`, s)."""
    hints: bool = False
    """Clients send the true level (`vllm_xargs: {urgency: N}`)."""
    limits: bool = False
    """Clients set `max_tokens`, which a policy can read, to the true length of their answer.
    Otherwise all requests have the same limit."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.arrivals in ("jsonl", "azure") and not self.path:
            raise ValueError(f"workload.path: arrivals of kind {self.arrivals} need it")
        if self.arrivals == "azure" and self.path not in ("conv", "code"):
            raise ValueError(
                f"workload.path: {self.path!r} is not an Azure trace; valid: conv, code"
            )
        if self.arrivals in ("jsonl", "azure") and (self.reuse.beginnings or self.reuse.turns > 1):
            raise ValueError(f"workload.reuse: {self.arrivals} has its own prompts; valid: unset")
        counted = self.requests or (self.arrivals == "bursts" and self.bursts)
        if self.arrivals in ("bursts", "poisson", "gamma") and not counted:
            raise ValueError("workload.requests: give the number of requests")
        for name in ("mix", "tenants"):
            weights = getattr(self, name)
            if weights and (min(weights) < 0 or sum(weights) <= 0):
                raise ValueError(
                    f"workload.{name}: {list(weights)} must be weights with a positive sum"
                )
        for shortest, longest in self.deadlines:
            if not 0 < shortest <= longest:
                raise ValueError(
                    f"workload.deadlines: [{shortest:g}, {longest:g}] must be two positive numbers "
                    "of seconds, the shorter first"
                )
        return self


class PredictorModel(Section):
    """Batches, errors and latency of the predictor."""

    mode: Literal["immediate", "full_batching"] = "immediate"
    """`immediate` predicts as soon as requests arrive, as a server does; `full_batching` waits for
    a full batch (paper, section 4.1)."""
    max_batch: int = Field(MAX_BATCH, ge=1)
    """Most texts in a batch."""
    max_wait: float = Field(0.05, ge=0)
    """`full_batching`: seconds after which an incomplete batch is predicted."""
    latency: float = Field(0.003, ge=0)
    """Seconds for one batch."""
    latency_per_request: float = Field(0.0, ge=0)
    """Seconds more per text of a batch."""
    urgency_error: float = Field(0.0, ge=0, le=1)
    """Error rate of the level (paper, section 4.1): the share of wrong levels, and their mean
    distance as a share of the number of levels."""
    length_error: float = Field(0.0, ge=0, le=1)
    """The same for the output-length bucket."""
    mistakes: Literal["inside", "clipped"] = "inside"
    """What happens to a mistake beyond the first or last class. `inside`: it goes the other way, so
    the error rate holds at the ends as well. `clipped`: it stops at the end, so half the mistakes
    about the most urgent level vanish."""
    confusion: tuple[tuple[float, ...], ...] = ()
    """Instead of `urgency_error`: per true level, weights of predicted levels, as in a report.json
    of `semsched evaluate`."""
    instant_error: float | None = Field(None, ge=0, lt=1)
    """Error rate of the instant reader, for level and length bucket, like `urgency_error`. Its
    provisional prediction gives a class the probability 1 - this, and shares the rest among the
    others. Unset: none, requests wait for the predictor."""
    buckets: int = Field(5, ge=1)
    """Number of output-length buckets, of equal width."""
    hold: bool = False
    """Queue a request only after its prediction, as the authors' simulator does. Otherwise it may
    run at the default level before that, as in the engine."""


class EngineModel(Section):
    """The simulated engine."""

    kind: Literal["paper", "vllm"] = "vllm"
    """`paper`: whole prompts, and a step takes as long as its slowest sequence. `vllm`: token
    budget, chunked prefill, KV blocks, and a step takes the sum of the profile's terms."""
    profile: str = "default"
    """Engine profile by name or path: the true times in the simulation."""
    assumed_profile: str | None = None
    """Profile that the policies assume; unset: the true one."""
    seats: int = Field(16, ge=1)
    """Most sequences in a step (the paper's batch size)."""
    asynchronous: bool = False
    """`vllm`: asynchronous scheduling, vLLM's default on GPUs. A step is decided when the one
    before begins: its outputs are not known yet, and an answer that ends is decoded once more."""
    token_budget: int = Field(2048, ge=1)
    """`vllm`: most tokens in a step."""
    block_size: int = Field(16, ge=1)
    """Tokens in a KV block."""
    kv_blocks: int | None = Field(None, ge=1)
    """KV blocks; unset: unlimited."""
    prefix_caching: bool = False
    """Requests with the same beginning share KV blocks: by `workload.reuse`, or where a trace has
    the hashes of the blocks."""
    swap: bool = False
    """Save victims' KV to the host if the policy's `retention` plans it."""
    host_blocks: int | None = Field(None, ge=0)
    """`swap`: KV blocks of the host pool; unset: unlimited."""
    batch: BatchTerms | None = None
    """`vllm`: terms of a step in place of the profile's."""
    arrival: float = Field(0.0, ge=0)
    """Engine time in seconds that each arriving request costs."""
    replicas: int = Field(1, ge=1)
    """Independent engines, each with its own queue and predictor."""
    routing: Routing = "least_loaded"
    """How requests are routed to engines: `round_robin`, `least_loaded` (fewest requests) or
    `urgency_aware` (fewest requests that are at least as urgent)."""


class Gate(Section):
    """The paper's gate: no less urgent prefills beside an urgent decode (Alg. 2)."""

    level: int = Field(0, ge=0)
    """Decodes of this and more urgent levels are protected."""
    schedulers: tuple[str, ...] = ()
    """The schedulers that have the gate, of those that order by urgency."""


class Boost(Section):
    """Order by arrival less a boost, see `sim.baselines.boosted`."""

    gamma: float = Field(gt=0)
    """Per second. The higher, the closer to the order of arrival; the lower, to shortest first."""
    lengths: bool = False
    """Whether the boost depends on the predicted length, too."""


class Baselines(Section):
    """Orders of other systems, for comparison. Only the simulator has them."""

    edf: tuple[str, ...] = ()
    """Schedulers of `base: sjf` that run the earliest deadline first."""
    las: tuple[str, ...] = ()
    """Schedulers of `base: priority` that run the least attained service first, as a queue with
    feedback does: a request falls by a level after 64 tokens, the next after four times as many,
    and so on."""
    boost: dict[str, Boost] = Field(default_factory=dict)
    """Schedulers of `base: semantic`, without `weighted_levels`, whose levels run by boosted
    arrival."""
    sessions: dict[str, Literal["first", "least"]] = Field(default_factory=dict)
    """Schedulers of `base: semantic`, without `weighted_levels`, whose levels run the session that
    began `first`, or the one with the `least` attained service."""


class Settings(Section):
    """A scenario file."""

    description: str = ""
    """Shown above the table."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same bytes of results."""
    repeats: int = Field(1, ge=1)
    """Runs per cell, with consecutive seeds; results are their mean."""
    workload: WorkloadModel
    predictor: PredictorModel = PredictorModel()
    engine: EngineModel = EngineModel()
    gate: Gate = Gate()
    baselines: Baselines = Baselines()
    schedulers: dict[str, dict[str, Any]] = Field(min_length=1)
    """Policy keys by name of the scheduler. With `policy: NAME OR PATH` they change that policy."""
    overrides: dict[str, Any] = Field({})
    """Policy keys of all schedulers except `fcfs`."""
    slos: tuple[Slo, ...] = ()
    """SLOs under all schedulers: one entry per level. Unset: those of the tiers of each
    scheduler's policy."""
    sweep: tuple[dict[str, tuple[Any, ...]], ...] = ()
    """Axes; every combination of their points is run. An axis maps fields (`workload.max_burst`) to
    their values; fields on one axis change together."""
