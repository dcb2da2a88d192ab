"""The paper's workload: bursts of requests of mixed urgency, open loop.

Every `gap` seconds a burst of randint(0, `max_burst`) requests arrives, all at one moment,
until there are enough (paper, section 5.1). The whole workload is drawn before the first
request is sent, so that every scheduler gets the same texts, lengths and arrival times.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_semantic_sched.bench.asks import Ask, AskSource, ask_source
from vllm_semantic_sched.bench.load import WorkloadConfig, parse_mix
from vllm_semantic_sched.bench.messages import write_message
from vllm_semantic_sched.datasets import data_root


@dataclass(frozen=True)
class BenchRequest:
    """One request: what is sent, when, and what only the benchmark knows.

    `arrival` is in seconds after the start. `level` is the true urgency, `output_tokens` the
    true output length; the server learns neither, except where a scheduler is given the
    level on purpose.
    """

    index: int
    arrival: float
    level: int
    text: str
    output_tokens: int

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
        """Tokens that all requests together ask for."""
        return sum(request.output_tokens for request in self.requests)

    @property
    def arrival_seconds(self) -> float:
        """Time over which the requests arrive: one gap for every burst, the last included."""
        return self.requests[-1].arrival + self.config.gap if self.requests else 0.0


def make_workload(config: WorkloadConfig, source: AskSource | None = None) -> Workload:
    """Draw a workload; the same configuration gives the same workload.

    Args:
        source: where asks and their lengths come from; by default the data folder, or the
            built-in asks where there is none.

    Raises:
        ValueError: the mix is unknown, or the sizes are not positive.
    """
    if config.requests < 1 or config.max_burst < 1 or config.gap < 0:
        raise ValueError("requests and max_burst must be at least 1, gap at least 0 seconds")
    # The mix enters the seed: two mixes sent to one server must not share prompts, or the
    # second would find them in the prefix cache.
    rng = np.random.default_rng([config.seed, zlib.crc32(config.mix.encode())])
    if source is None:
        source, description = ask_source(data_root())
    else:
        description = "given by the caller"
    levels = _levels(parse_mix(config.mix), config.requests, rng)
    arrivals = _arrivals(config, rng)
    requests = tuple(
        _request(index, arrival, level, source, config, rng)
        for index, (arrival, level) in enumerate(zip(arrivals, levels, strict=True))
    )
    return Workload(config, requests, description)


def _levels(shares: Sequence[float], count: int, rng: np.random.Generator) -> list[int]:
    """Levels in random order whose counts match the shares as closely as whole numbers can.

    Drawing each level on its own would let a rare level's count, and with it its p99, swing
    with the seed.
    """
    edges = np.rint(np.cumsum(shares) * count).astype(int)
    levels = np.searchsorted(edges, np.arange(count), side="right")
    return [int(level) for level in rng.permutation(levels)]


def _arrivals(config: WorkloadConfig, rng: np.random.Generator) -> list[float]:
    arrivals: list[float] = []
    burst = 0
    while len(arrivals) < config.requests:
        size = int(rng.integers(0, config.max_burst + 1))
        arrivals += [burst * config.gap] * min(size, config.requests - len(arrivals))
        burst += 1
    return arrivals


def _request(
    index: int,
    arrival: float,
    level: int,
    source: AskSource,
    config: WorkloadConfig,
    rng: np.random.Generator,
) -> BenchRequest:
    ask: Ask = source(rng)
    text = f"{write_message(level, rng)} {ask.text}"
    length = int(np.clip(ask.output_tokens, config.min_output_tokens, config.max_output_tokens))
    return BenchRequest(index, arrival, level, text, length)
