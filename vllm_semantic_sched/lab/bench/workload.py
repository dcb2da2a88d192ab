"""The paper's workload: bursts of requests of mixed urgency, open loop.

A burst of randint(0, `max_burst`) requests arrives every `gap` seconds, all at one moment, until
there are enough (paper, section 5.1). The whole workload is drawn before the first request is
sent, so that every scheduler gets the same texts, lengths and arrival times.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from vllm_semantic_sched.lab.bench.texts import (
    QuestionSource,
    question_source,
    write_context,
    write_message,
)
from vllm_semantic_sched.sim.datasets import data_root

# The command line shows the defaults below: numpy is imported only where a workload is drawn.
if TYPE_CHECKING:
    import numpy as np

LEVELS = 5
"""Number of urgency levels; 0 is the most urgent."""

MIXES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"even": (0.20, 0.20, 0.20, 0.20, 0.20), "rare": (0.05, 0.15, 0.25, 0.30, 0.25)}
)
"""Share of each urgency level, most urgent first."""

PLACES = ("alone", "before", "inside")
"""Where the message of a known urgency may stand in a prompt."""

ANSWER_FIELD = "bench_answer"
"""Key in `vllm_xargs` under which `bench.answer_length` finds the length of an answer."""


@dataclass(frozen=True)
class WorkloadConfig:
    """What to draw. Times in seconds, lengths in tokens.

    `long_prompts` is the share of the requests of levels 1 to 4 with a long context: about 1,000
    tokens between message and question. With `natural` the model ends its answers itself. `place`
    is that of the message: `alone`, `before` a question, or `inside`, between two questions.
    `tenants` are the weights of the tenants that send requests; empty: requests have no tenant.
    """

    requests: int = 600
    mix: str = "even"
    gap: float = 0.5
    max_burst: int = 50
    seed: int = 0
    min_output_tokens: int = 8
    max_output_tokens: int = 384
    long_prompts: float = 0.0
    natural: bool = False
    place: str = "before"
    tenants: tuple[float, ...] = ()


@dataclass(frozen=True)
class BenchRequest:
    """What is sent, when (`arrival`, seconds after the start), and the true urgency (`level`) and
    output length, which the server learns only if a scheduler is told on purpose."""

    index: int
    arrival: float
    level: int
    text: str
    output_tokens: int
    tenant: str = ""

    @property
    def text_hash(self) -> str:
        """Short digest that identifies the text in records."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Workload:
    """The requests in order of arrival, and where their lengths come from."""

    config: WorkloadConfig
    requests: tuple[BenchRequest, ...]
    length_source: str

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def arrival_seconds(self) -> float:
        """Time over which the requests arrive: one gap for every burst, including the last."""
        return self.requests[-1].arrival + self.config.gap if self.requests else 0.0


def parse_mix(mix: str) -> tuple[float, ...]:
    """Return the shares of the levels: a name in `MIXES`, or five weights separated by colons.
    ValueError if it is neither, or the weights have no positive sum."""
    if mix in MIXES:
        return MIXES[mix]
    weights = _parse_weights(mix)
    if len(weights) != LEVELS:
        raise ValueError(
            f"mix {mix!r} is neither one of {', '.join(MIXES)} nor {LEVELS} weights like 1:2:3:2:2"
        )
    return weights


def parse_tenants(text: str) -> tuple[float, ...]:
    """Return the shares of the tenants, given as weights separated by colons; none for an empty
    text. ValueError if there are others than weights, or they have no positive sum."""
    weights = _parse_weights(text)
    if text and not weights:
        raise ValueError(f"tenants {text!r} are not weights like 4:1:1")
    return weights


def _parse_weights(text: str) -> tuple[float, ...]:
    """Weights separated by colons, divided by their sum; none if that is not what the text has."""
    try:
        weights = [float(part) for part in text.split(":")]
    except ValueError:
        return ()
    total = sum(weights)
    return tuple(weight / total for weight in weights) if min(weights) >= 0 < total else ()


def make_workload(config: WorkloadConfig, source: QuestionSource | None = None) -> Workload:
    """Draw a workload; the same configuration gives the same workload. Questions come from
    `source`, else the data folder, else the built-in ones. ValueError for a bad mix or size."""
    import numpy as np

    from vllm_semantic_sched.sim.workload import draw_levels

    if config.requests < 1 or config.max_burst < 1 or config.gap < 0:
        raise ValueError("requests and max_burst must be at least 1, gap at least 0 seconds")
    if config.place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}, got {config.place!r}")
    if not 0 <= config.long_prompts <= 1:
        raise ValueError(f"long_prompts must be a share from 0 to 1, got {config.long_prompts}")
    # The mix is part of the seed: two mixes sent to one server must not share prompts, or the
    # second would find them in the prefix cache.
    rng = np.random.default_rng([config.seed, zlib.crc32(config.mix.encode())])
    if source is None:
        source, description = question_source(data_root())
    else:
        description = "given by the caller"
    levels = draw_levels(parse_mix(config.mix), LEVELS, config.requests, rng).tolist()
    arrivals = _draw_arrivals(config, rng)
    # Generators of their own: the same requests with and without long contexts and tenants.
    context_rng, tenant_rng = (np.random.default_rng([config.seed, n]) for n in (1, 2))
    tenants = [""] * config.requests
    if config.tenants:
        drawn = tenant_rng.choice(len(config.tenants), config.requests, p=config.tenants)
        tenants = [f"tenant {number}" for number in drawn]
    requests = []
    for index, (arrival, level) in enumerate(zip(arrivals, levels, strict=True)):
        question = source(rng)
        parts = [write_message(level, rng), question.text]
        if config.place == "alone":
            parts.pop()
        elif config.place == "inside":
            parts.insert(0, source(rng).text)
        if level > 0 and context_rng.random() < config.long_prompts:
            parts.insert(-1, write_context(context_rng))
        text = " ".join(parts)
        shortest = max(config.min_output_tokens, question.output_tokens)
        length = min(config.max_output_tokens, shortest)
        requests.append(BenchRequest(index, arrival, level, text, length, tenants[index]))
    return Workload(config, tuple(requests), description)


def _draw_arrivals(config: WorkloadConfig, rng: np.random.Generator) -> list[float]:
    arrivals: list[float] = []
    burst = 0
    while len(arrivals) < config.requests:
        arrivals += [burst * config.gap] * int(rng.integers(0, config.max_burst + 1))
        burst += 1
    return arrivals[: config.requests]
