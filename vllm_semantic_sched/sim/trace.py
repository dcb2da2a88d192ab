"""Recorded traces: JSON lines of any origin, and the Azure LLM inference trace of 2023."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vllm_semantic_sched.datasets import data_root
from vllm_semantic_sched.sim.sections import WorkloadModel

_EPOCH = datetime(2023, 1, 1)


class TraceError(ValueError):
    """A trace is missing or malformed. The message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A recorded request: seconds since any moment, tokens, and the level if it is known."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    level: int | None


def read_trace(model: WorkloadModel, levels: int) -> list[TraceRow]:
    """The first `model.requests` rows of the trace, in order of arrival.

    Raises:
        TraceError: the file is missing, empty or malformed, or has a level that is none.
    """
    assert model.path is not None
    if model.arrivals == "azure":
        root = data_root()
        if root is None:
            raise TraceError(
                "the Azure trace needs the data folder: set SEMSCHED_DATA to the folder that "
                "holds azure_llm_2023/"
            )
        path = root / "azure_llm_2023" / f"AzureLLMInferenceTrace_{model.path}.csv"
        rows = _azure_rows(path)
    else:
        path = Path(model.path).expanduser()
        rows = _json_rows(path, levels)
    try:
        found = list(itertools.islice(rows, model.requests))
    except OSError as error:
        raise TraceError(f"trace {path}: {error.strerror}") from error
    if not found:
        raise TraceError(f"trace {path}: no requests in it")
    return sorted(found, key=lambda row: row.arrival)


def _json_rows(path: Path, levels: int) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                level = record.get("level")
                row = TraceRow(
                    float(record["arrival"]),
                    int(record["prompt_tokens"]),
                    int(record["output_tokens"]),
                    None if level is None else int(level),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise TraceError(
                    f"trace {path}, line {number}: expected an object with arrival, "
                    f"prompt_tokens, output_tokens: {error!r}"
                ) from error
            if row.level is not None and not 0 <= row.level < levels:
                raise TraceError(
                    f"trace {path}, line {number}: level {row.level}; valid: 0 to {levels - 1}"
                )
            if min(row.prompt_tokens, row.output_tokens) < 1:
                raise TraceError(f"trace {path}, line {number}: lengths must be at least 1")
            yield row


def _azure_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8", newline="") as file:
        for number, record in enumerate(csv.DictReader(file), 2):
            try:
                # Seven digits of a second; datetime takes six.
                moment = datetime.fromisoformat(record["TIMESTAMP"][:26])
                yield TraceRow(
                    (moment - _EPOCH).total_seconds(),
                    max(1, int(record["ContextTokens"])),
                    max(1, int(record["GeneratedTokens"])),
                    None,
                )
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"trace {path}, line {number}: {error!r}") from error
