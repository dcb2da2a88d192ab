"""Draws the requests of a run: when they arrive, how long they are, how urgent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.sections import Lengths, WorkloadModel
from vllm_semantic_sched.sim.trace import TraceRow, read_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run in order of arrival, a column per property: a million of them take
    21 MB. Arrivals in seconds from the first, lengths in tokens, levels as they truly are."""

    arrivals: np.ndarray
    levels: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray

    def __len__(self) -> int:
        return len(self.arrivals)

    def request(self, index: int) -> SimRequest:
        """One of them."""
        return SimRequest(
            index,
            float(self.arrivals[index]),
            int(self.levels[index]),
            int(self.prompts[index]),
            int(self.outputs[index]),
        )


def draw_workload(model: WorkloadModel, levels: int, rng: np.random.Generator) -> Workload:
    """The requests of a run.

    Raises:
        TraceError: a trace cannot be read.
    """
    if model.path is not None and model.arrivals in ("jsonl", "azure"):
        return _replayed(read_trace(model, levels), model, levels, rng)
    arrivals = draw_arrivals(model, rng) / model.speed
    count = len(arrivals)
    return Workload(
        arrivals,
        draw_levels(model.mix, levels, count, rng).astype(np.int8),
        draw_lengths(model.prompt, count, rng).astype(np.int32),
        draw_lengths(model.output, count, rng).astype(np.int32),
    )


def draw_arrivals(model: WorkloadModel, rng: np.random.Generator) -> np.ndarray:
    """Moments of arrival in seconds, increasing."""
    if model.arrivals == "bursts":
        return _bursts(model, rng)
    assert model.requests is not None
    if model.arrivals == "poisson":
        gaps = rng.exponential(1 / model.rate, model.requests)
    else:
        shape = 1 / model.cv**2
        gaps = rng.gamma(shape, 1 / (model.rate * shape), model.requests)
    arrivals: np.ndarray = np.cumsum(gaps)
    return arrivals


def _bursts(model: WorkloadModel, rng: np.random.Generator) -> np.ndarray:
    """Sizes are drawn evenly from 0 to `max_burst`, as in the authors' simulator."""
    if model.bursts is not None:
        sizes = rng.integers(0, model.max_burst + 1, model.bursts)
        wanted = sizes.sum() if model.requests is None else model.requests
    else:
        assert model.requests is not None
        wanted = model.requests
        drawn: list[int] = []
        while sum(drawn) < wanted:
            drawn += rng.integers(0, model.max_burst + 1, 1 + wanted // model.max_burst).tolist()
        sizes = np.array(drawn)
    return np.repeat(np.arange(len(sizes)) * model.gap, sizes)[:wanted]


def draw_levels(
    mix: Sequence[float], levels: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Levels in random order whose counts match the mix as closely as whole numbers can: drawn
    one by one, a rare level's count would swing with the seed."""
    weights = np.array(mix or [1.0] * levels)
    edges = np.rint(np.cumsum(weights) / weights.sum() * count)
    ordered = np.searchsorted(edges, np.arange(count), side="right")
    return rng.permutation(ordered)


def draw_lengths(model: Lengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths in tokens, from 1 to `model.most`."""
    if model.kind == "uniform":
        assert model.low is not None and model.high is not None
        lengths = rng.integers(model.low, model.high + 1, count)
    elif model.kind == "lognormal":
        assert model.median is not None and model.sigma is not None
        lengths = np.rint(rng.lognormal(np.log(model.median), model.sigma, count)).astype(int)
    elif model.kind == "empirical":
        lengths = rng.choice(np.array(model.values), count)
    else:
        lengths = np.full(count, model.value)
    return np.clip(lengths, 1, model.most)


def _replayed(
    rows: list[TraceRow], model: WorkloadModel, levels: int, rng: np.random.Generator
) -> Workload:
    drawn = draw_levels(model.mix, levels, len(rows), rng)
    known = [drawn[i] if row.level is None else row.level for i, row in enumerate(rows)]
    return Workload(
        (np.array([row.arrival for row in rows]) - rows[0].arrival) / model.speed,
        np.array(known, dtype=np.int8),
        np.array([row.prompt_tokens for row in rows], dtype=np.int32),
        np.array([row.output_tokens for row in rows], dtype=np.int32),
    )
