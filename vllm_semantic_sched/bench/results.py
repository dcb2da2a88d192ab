"""The results of a comparison, and the JSON file that holds them."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from vllm_semantic_sched.bench.client import Record
from vllm_semantic_sched.bench.metrics import (
    Difference,
    IdleModel,
    Summary,
    by_level,
    failed,
    latest_send,
    throughput,
)
from vllm_semantic_sched.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.bench.workload import Workload
from vllm_semantic_sched.profiling.live_engine import processor


@dataclass(frozen=True)
class Round:
    """One pass of one scheduler over one mix, on a server started for it.

    `number` counts from 1. `differences` are outputs that differ from those of the reference
    scheduler's first round. `cpu_seconds` is by process; other programs used `elsewhere_seconds`
    of the machine's `machine_seconds` of CPU time (idle time included).
    """

    number: int
    records: Sequence[Record]
    counters: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    machine_seconds: float = 0.0
    elsewhere_seconds: float = 0.0
    differences: Sequence[Difference] = ()

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of this round alone."""
        return throughput([self.records])


@dataclass
class MixResult:
    """One scheduler under one mix of levels: its rounds, pooled.

    Every request counts once per round. `levels` are the summaries of all rounds' records.
    """

    scheduler: SchedulerSpec
    workload: Workload
    rounds: list[Round] = field(default_factory=list)
    levels: dict[str, dict[str, Summary]] = field(default_factory=dict)

    def add(self, done: Round, idle: IdleModel) -> None:
        """Add a round."""
        self.rounds.append(done)
        self.levels = by_level(self.records, idle)

    @property
    def records(self) -> list[Record]:
        """The records of all rounds, in the order of the rounds."""
        return [record for done in self.rounds for record in done.records]

    @property
    def requests(self) -> int:
        """Number of requests sent."""
        return sum(len(done.records) for done in self.rounds)

    @property
    def failed(self) -> list[Record]:
        """Requests that were not answered in full."""
        return failed(self.records)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all rounds divided by the duration of all rounds."""
        return throughput(done.records for done in self.rounds)

    @property
    def latest_send(self) -> float:
        """See `metrics.latest_send`."""
        return latest_send(self.records)

    @property
    def overload(self) -> float:
        """Offered output tokens per second divided by those served."""
        offered = self.workload.output_tokens / max(self.workload.arrival_seconds, 1e-9)
        return offered / self.tokens_per_second if self.tokens_per_second else math.inf

    @property
    def counters(self) -> Counter[str]:
        """Server counters, summed over the rounds."""
        return _sum(done.counters for done in self.rounds)

    @property
    def cpu_seconds(self) -> Counter[str]:
        """CPU time by process, summed over the rounds."""
        return _sum(done.cpu_seconds for done in self.rounds)

    @property
    def elsewhere(self) -> float:
        """Share of the machine's CPU time that other programs used."""
        total = sum(done.machine_seconds for done in self.rounds)
        return sum(done.elsewhere_seconds for done in self.rounds) / total if total else 0.0

    @property
    def differences(self) -> list[Difference]:
        """Outputs of all rounds that differ from the reference's first round."""
        return [difference for done in self.rounds for difference in done.differences]

    @property
    def counted_differences(self) -> list[Difference]:
        """Differing outputs that rounding does not explain."""
        return [difference for difference in self.differences if difference.counts]


def _sum(parts: Iterable[Mapping[str, float]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return total


@dataclass
class Comparison:
    """A whole run: by mix, then by scheduler, in the order of the first round."""

    idle: IdleModel
    options: Mapping[str, object]
    mixes: dict[str, dict[str, MixResult]] = field(default_factory=dict)

    def add(self, scheduler: SchedulerSpec, workload: Workload, done: Round) -> None:
        """Add a round of one scheduler."""
        rows = self.mixes.setdefault(workload.config.mix, {})
        row = rows.setdefault(scheduler.name, MixResult(scheduler, workload))
        row.add(done, self.idle)

    def reference(self, mix: str) -> Round | None:
        """Return the round that outputs are compared with: the first one of the first scheduler."""
        row = next(iter(self.mixes.get(mix, {}).values()), None)
        return row.rounds[0] if row else None

    def rows(self) -> list[MixResult]:
        """Return all results, mix by mix."""
        return [row for rows in self.mixes.values() for row in rows.values()]

    def failures(self) -> list[str]:
        """Return a sentence for each result with requests that were not answered in full."""
        return [
            f"{row.scheduler.name}, mix {row.workload.config.mix}: {len(row.failed)} requests "
            f"failed, the first with: {row.failed[0].error or 'another output length than wanted'}"
            for row in self.rows()
            if row.failed
        ]

    def write(self, path: Path) -> None:
        """Write all results except the output texts as JSON; undefined numbers become null."""
        document = {
            "environment": environment(),
            "options": dict(self.options),
            "idle_model": asdict(self.idle),
            "mixes": {
                mix: {name: _mix_document(row) for name, row in rows.items()}
                for mix, rows in self.mixes.items()
            },
        }
        path.write_text(json.dumps(_finite(document), indent=1, default=str) + "\n")


def environment() -> dict[str, object]:
    """Return the versions and the hardware that measurements depend on."""
    versions = {}
    for name in ("vllm", "torch", "transformers", "vllm-semantic-sched"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def _totals(result: Round | MixResult) -> dict[str, object]:
    return {
        "tokens_per_second": result.tokens_per_second,
        "failed": len(failed(result.records)),
        "latest_send": latest_send(result.records),
        "counters": dict(result.counters),
        "cpu_seconds": dict(result.cpu_seconds),
    }


def _mix_document(row: MixResult) -> dict[str, object]:
    return {
        "scheduler": asdict(row.scheduler),
        "title": row.scheduler.title,
        "workload": asdict(row.workload.config),
        "length_source": row.workload.length_source,
        **_totals(row),
        "overload": row.overload,
        "differences": len(row.differences),
        "counted_differences": len(row.counted_differences),
        "cpu_share_elsewhere": row.elsewhere,
        "rounds": [_round_document(done) for done in row.rounds],
        "levels": {
            level: {key: asdict(summary) for key, summary in metrics.items()}
            for level, metrics in row.levels.items()
        },
        "records": [
            {"round": done.number, **_record_document(record)}
            for done in row.rounds
            for record in done.records
        ],
    }


def _round_document(done: Round) -> dict[str, object]:
    return {
        "round": done.number,
        **_totals(done),
        "differences": [asdict(difference) for difference in done.differences],
        "machine_seconds": done.machine_seconds,
        "elsewhere_seconds": done.elsewhere_seconds,
    }


def _record_document(record: Record) -> dict[str, object]:
    document = asdict(record)
    del document["token_ids"], document["margins"]
    return {**document, "token_hash": record.token_hash}


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
