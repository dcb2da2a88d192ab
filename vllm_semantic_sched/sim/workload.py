"""The requests of a run, drawn from distributions or read from a recorded trace."""

import csv
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_semantic_sched.sim.data_folder import data_root
from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.sections import Lengths, Reuse, WorkloadModel

_EPOCH = datetime(2023, 1, 1)
_HASHED_TOKENS = 512  # of one of a trace's `hash_ids`
_MOST_TURNS = 10  # of a session, as a multiple of the mean


class Segment(NamedTuple):
    """A part of a request's tokens. Requests with the same `id` have the same ones up to there."""

    id: int
    end: int  # tokens from the beginning of the request


class WorkloadError(ValueError):
    """Requests that cannot be simulated: their trace is missing or malformed, which the message
    names with the line, or one is too large for the engine."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run in order of arrival, as one array per property: 21 MB for a million."""

    arrivals: np.ndarray  # seconds since the first arrival
    levels: np.ndarray  # true ones
    prompts: np.ndarray  # tokens
    outputs: np.ndarray
    tenants: np.ndarray | None = None  # number of each request's tenant
    deadlines: np.ndarray | None = None  # of the answers, seconds from arrival; NaN: none
    recorded: Sequence[SimRequest] = ()  # the requests themselves, if more of them is known
    segments: Sequence[tuple[Segment, ...]] = ()  # of each request, if some begin alike
    block_size: int = 16  # tokens of a KV block, in which requests share their segments
    # Number of each request's session, and seconds after the answer before its own at which it
    # comes, in place of its arrival; None: no request waits for another one's answer.
    sessions: np.ndarray | None = None
    pauses: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.arrivals)

    def request(self, index: int) -> SimRequest:
        """The request at a place in the order of arrival, from 0."""
        if self.recorded:
            return self.recorded[index]
        tenant = "" if self.tenants is None else f"tenant {self.tenants[index]}"
        return SimRequest(
            index,
            arrival=float(self.arrivals[index]),
            level=int(self.levels[index]),
            prompt_tokens=int(self.prompts[index]),
            output_tokens=int(self.outputs[index]),
            tenant=tenant,
            session="" if self.sessions is None else f"session {self.sessions[index]}",
            deadline=self._deadline(index),
            blocks=tuple(self._blocks(self.segments[index])) if self.segments else (),
        )

    def followers(self) -> dict[int, int]:
        """By place, the place of the request that waits for its answer."""
        if self.sessions is None:
            return {}
        latest: dict[int, int] = {}
        followers: dict[int, int] = {}
        for place, session in enumerate(self.sessions.tolist()):
            if session in latest:
                followers[latest[session]] = place
            latest[session] = place
        return followers

    def _deadline(self, index: int) -> float | None:
        seconds = math.nan if self.deadlines is None else float(self.deadlines[index])
        return None if math.isnan(seconds) else seconds

    def _blocks(self, segments: Sequence[Segment]) -> Iterator[int]:
        """See `SimRequest.blocks`."""
        begin = 0  # blocks
        for segment in segments:
            end = segment.end // self.block_size
            for place in range(begin, end):
                yield hash((segment.id, place))
            begin = end


def draw_workload(
    model: WorkloadModel, levels: int, rng: np.random.Generator, block_size: int = 16
) -> Workload:
    """Draw the requests of a run, or read them from a trace. WorkloadError if it cannot be read."""
    segments: list[tuple[Segment, ...]] = []
    stated = sessions = pauses = None
    if model.arrivals in ("jsonl", "azure"):
        rows = _read_trace(model, levels)
        true_levels = draw_levels(model.mix, levels, len(rows), rng)
        for index, row in enumerate(rows):
            if row.level is not None:
                true_levels[index] = row.level
        times = np.array([row.arrival for row in rows])
        arrivals = times - times[0]
        prompts = np.array([row.prompt_tokens for row in rows])
        outputs = np.array([row.output_tokens for row in rows])
        if any(row.segments for row in rows):
            segments = [row.segments for row in rows]
        if any(row.deadline is not None for row in rows):
            stated = np.array([row.deadline for row in rows], dtype=float)
    elif model.reuse.beginnings or model.reuse.turns > 1:
        turns = _draw_sessions(model, levels, rng)
        arrivals, true_levels, prompts, outputs, segments, sessions, pauses = turns
    else:
        arrivals = _draw_arrivals(model, rng)
        count = len(arrivals)
        true_levels = draw_levels(model.mix, levels, count, rng)
        prompts = _draw_lengths(model.prompt, count, rng)
        outputs = _draw_lengths(model.output, count, rng)
    tenants = None
    if model.tenants:
        weights = np.array(model.tenants)
        tenants = rng.choice(len(weights), len(arrivals), p=weights / weights.sum())
        if sessions is not None:
            tenants = tenants[sessions]
    if model.deadlines:
        shortest, longest = np.array(model.deadlines).T[:, true_levels]
        drawn = rng.uniform(shortest, longest)
        stated = drawn if stated is None else np.where(np.isnan(stated), drawn, stated)
    return Workload(
        arrivals=arrivals / model.speed,
        levels=true_levels.astype(np.int8),
        prompts=prompts.astype(np.int32),
        outputs=outputs.astype(np.int32),
        tenants=tenants,
        deadlines=stated,
        segments=segments,
        block_size=block_size,
        sessions=sessions,
        pauses=None if pauses is None else pauses / model.speed,
    )


class _Turns(NamedTuple):
    """Requests of sessions, as in `Workload`."""

    arrivals: np.ndarray
    levels: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    segments: list[tuple[Segment, ...]]
    sessions: np.ndarray | None
    pauses: np.ndarray | None


def _draw_sessions(model: WorkloadModel, levels: int, rng: np.random.Generator) -> _Turns:
    """The requests of sessions, see `Reuse`."""
    reuse = model.reuse
    first = model.model_copy(
        update={
            "rate": model.rate / reuse.turns,
            "requests": None if model.requests is None else -(-model.requests // reuse.turns),
        }
    )
    starts = _draw_arrivals(first, rng)
    sessions = len(starts)
    counts = _draw_turns(reuse, sessions, rng)
    turns = int(counts.max(initial=1))
    pauses = rng.exponential(reuse.pause, (sessions, turns))
    pauses[:, 0] = starts
    arrivals = pauses.cumsum(axis=1).ravel()
    true_levels = np.repeat(draw_levels(model.mix, levels, sessions, rng), turns)
    added = _draw_lengths(model.prompt, sessions * turns, rng).reshape(sessions, turns)
    outputs = _draw_lengths(model.output, sessions * turns, rng).reshape(sessions, turns)
    beginnings = _draw_lengths(reuse.beginning, reuse.beginnings, rng)
    numbers = np.zeros(sessions, dtype=int)
    shared = np.zeros(sessions, dtype=int)  # tokens
    if reuse.beginnings:
        numbers = rng.integers(0, reuse.beginnings, sessions)
        shared = beginnings[numbers]
    answered = outputs.cumsum(axis=1) - outputs  # in the turns before
    prompts = shared[:, np.newaxis] + added.cumsum(axis=1) + answered
    totals = (prompts + outputs).ravel()
    order = np.argsort(arrivals, kind="stable")
    order = order[order % turns < counts[order // turns]]
    if not reuse.closed:  # whose sessions may be cut off
        order = order[: model.requests]
    segments: list[tuple[Segment, ...]] = []
    for place in order.tolist():
        session = place // turns
        beginning = Segment(sessions + int(numbers[session]), int(shared[session]))
        segments.append((beginning, Segment(session, int(totals[place]))))
    return _Turns(
        arrivals=arrivals[order],
        levels=true_levels[order],
        prompts=prompts.ravel()[order],
        outputs=outputs.ravel()[order],
        segments=segments,
        sessions=order // turns if reuse.closed else None,
        pauses=pauses.ravel()[order] if reuse.closed else None,
    )


def _draw_turns(reuse: Reuse, sessions: int, rng: np.random.Generator) -> np.ndarray:
    """The number of requests of each session, whose mean is `reuse.turns`."""
    if not reuse.spread:
        return np.full(sessions, reuse.turns)
    median = reuse.turns / math.exp(reuse.spread**2 / 2)
    drawn = rng.lognormal(math.log(median), reuse.spread, sessions)
    return np.clip(np.rint(drawn), 1, _MOST_TURNS * reuse.turns).astype(int)


def _draw_arrivals(model: WorkloadModel, rng: np.random.Generator) -> np.ndarray:
    """Increasing times of arrival in seconds."""
    if model.arrivals == "bursts":
        return _draw_bursts(model, rng)
    assert model.requests is not None
    if model.arrivals == "poisson":
        return np.cumsum(rng.exponential(1 / model.rate, model.requests))
    shape = 1 / model.cv**2
    return np.cumsum(rng.gamma(shape, 1 / (model.rate * shape), model.requests))


def _draw_bursts(model: WorkloadModel, rng: np.random.Generator) -> np.ndarray:
    """Burst sizes are uniform from 0 to `max_burst`, as in the authors' simulator."""
    total = model.requests
    above = model.max_burst + 1
    if model.bursts is not None:
        sizes = rng.integers(0, above, model.bursts)
    else:
        assert total is not None
        sizes = np.zeros(0, dtype=int)
        while sizes.sum() < total:
            sizes = np.append(sizes, rng.integers(0, above, 1 + total // model.max_burst))
    return np.repeat(np.arange(len(sizes)) * model.gap, sizes)[:total]


def draw_levels(
    mix: Sequence[float], levels: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Levels in random order, whose counts match the mix up to rounding. With independent draws
    the count of a rare level would vary with the seed."""
    weights = np.array(mix or [1.0] * levels)
    edges = np.rint(np.cumsum(weights) / weights.sum() * count)
    return rng.permutation(np.searchsorted(edges, np.arange(count), side="right"))


def _draw_lengths(model: Lengths, count: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths in tokens, from 1 to `model.most`."""
    if model.kind == "uniform":
        assert model.low is not None and model.high is not None
        lengths = rng.integers(model.low, model.high + 1, count)
    elif model.kind == "lognormal":
        assert model.median is not None and model.sigma is not None
        lengths = np.rint(rng.lognormal(np.log(model.median), model.sigma, count)).astype(int)
    else:
        lengths = np.full(count, model.value)
    return np.clip(lengths, 1, model.most)


class _TraceRow(NamedTuple):
    """A recorded request; `arrival` in seconds from any start, `level` None if unknown."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    level: int | None
    segments: tuple[Segment, ...] = ()  # of its prompt
    deadline: float | None = None  # seconds from its arrival


def _read_trace(model: WorkloadModel, levels: int) -> list[_TraceRow]:
    """The first `model.requests` rows of a trace, in order of arrival."""
    assert model.path is not None
    if model.arrivals == "azure":
        root = data_root()
        if root is None:
            raise WorkloadError(
                "the Azure trace needs the data folder: set SEMSCHED_DATA to the folder that "
                "holds azure_llm_2023/"
            )
        path = root / "azure_llm_2023" / f"AzureLLMInferenceTrace_{model.path}.csv"
        rows = _azure_rows(path)
    else:
        path = Path(model.path).expanduser()
        rows = _json_rows(path, levels)
    try:
        first = list(itertools.islice(rows, model.requests))
    except OSError as error:
        raise WorkloadError(f"trace {path}: {error.strerror}") from error
    if not first:
        raise WorkloadError(f"trace {path}: has no requests")
    return sorted(first, key=lambda row: row.arrival)


def _json_rows(path: Path, levels: int) -> Iterator[_TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"trace {path}, line {number}"
            try:
                record = json.loads(line)
                level, deadline = record.get("level"), record.get("deadline")
                if "input_length" in record:  # Mooncake's
                    arrival = float(record["timestamp"]) / 1000
                    prompt, output = record["input_length"], record["output_length"]
                else:
                    arrival = float(record["arrival"])
                    prompt, output = record["prompt_tokens"], record["output_tokens"]
                row = _TraceRow(
                    arrival=arrival,
                    prompt_tokens=int(prompt),
                    output_tokens=int(output),
                    level=None if level is None else int(level),
                    segments=tuple(_hashed(record.get("hash_ids", ()), int(prompt))),
                    deadline=None if deadline is None else float(deadline),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WorkloadError(
                    f"{where}: expected an object with arrival, prompt_tokens, output_tokens: "
                    f"{error!r}"
                ) from error
            if row.level is not None and not 0 <= row.level < levels:
                raise WorkloadError(f"{where}: level {row.level}; valid: 0 to {levels - 1}")
            if min(row.prompt_tokens, row.output_tokens) < 1:
                raise WorkloadError(f"{where}: lengths must be at least 1")
            if row.deadline is not None and not 0 < row.deadline < math.inf:
                raise WorkloadError(f"{where}: deadline {row.deadline:g}; valid: above 0")
            yield row


def _hashed(ids: Sequence[int], prompt_tokens: int) -> Iterator[Segment]:
    """The segments of a prompt with such `hash_ids`."""
    for number, segment_id in enumerate(ids, 1):
        yield Segment(int(segment_id), min(number * _HASHED_TOKENS, prompt_tokens))


def _azure_rows(path: Path) -> Iterator[_TraceRow]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, record in enumerate(csv.DictReader(file), 2):
            try:
                # The file has seven digits of a second, datetime takes six.
                time = datetime.fromisoformat(record["TIMESTAMP"][:26])
                yield _TraceRow(
                    arrival=(time - _EPOCH).total_seconds(),
                    prompt_tokens=max(1, int(record["ContextTokens"])),
                    output_tokens=max(1, int(record["GeneratedTokens"])),
                    level=None,
                )
            except (ValueError, KeyError, TypeError) as error:
                raise WorkloadError(f"trace {path}, line {number}: {error!r}") from error
