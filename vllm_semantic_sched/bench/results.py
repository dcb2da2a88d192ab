"""The outcome of a comparison, and the file it is kept in."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
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
    throughput,
)
from vllm_semantic_sched.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.bench.workload import Workload


@dataclass
class MixResult:
    """One scheduler under one mix of levels.

    `overload` is offered output tokens per second over those that were served. `differences`
    are outputs that depart from the reference scheduler's. `cpu_seconds` is by process;
    `elsewhere` is the share of the machine's CPU time that other programs used.
    """

    scheduler: SchedulerSpec
    workload: Workload
    records: Sequence[Record]
    levels: dict[str, dict[str, Summary]]
    tokens_per_second: float
    counters: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    elsewhere: float = 0.0
    differences: Sequence[Difference] = ()

    @classmethod
    def of(
        cls,
        scheduler: SchedulerSpec,
        workload: Workload,
        records: Sequence[Record],
        idle: IdleModel,
    ) -> MixResult:
        """Summarise the records of a run."""
        return cls(scheduler, workload, records, by_level(records, idle), throughput(records))

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return len(self.records)

    @property
    def failed(self) -> list[Record]:
        """Requests that were not answered in full."""
        return failed(self.records)

    @property
    def latest_send(self) -> float:
        """Seconds by which the request that left latest missed its time.

        Large values mean that this machine was too busy to keep the open loop, and that the
        figures are not to be trusted.
        """
        delays = (item.sent - item.arrival for item in self.records if item.sent is not None)
        return max(delays, default=0.0)

    @property
    def overload(self) -> float:
        """Offered over served output tokens per second."""
        offered = self.workload.output_tokens / max(self.workload.arrival_seconds, 1e-9)
        return offered / self.tokens_per_second if self.tokens_per_second else math.inf

    @property
    def counted_differences(self) -> list[Difference]:
        """Differing outputs that rounding does not explain."""
        return [difference for difference in self.differences if difference.counts]


@dataclass
class Comparison:
    """A whole run: by mix, then by scheduler, in the order they were run."""

    idle: IdleModel
    options: Mapping[str, object]
    mixes: dict[str, dict[str, MixResult]] = field(default_factory=dict)

    def add(self, result: MixResult) -> None:
        """Put a result in its place."""
        rows = self.mixes.setdefault(result.workload.config.mix, {})
        rows[result.scheduler.name] = result

    def write(self, path: Path) -> None:
        """Write everything but the output texts as JSON (undefined numbers become null)."""
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
    """Versions and hardware that a figure depends on."""
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
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _mix_document(row: MixResult) -> dict[str, object]:
    return {
        "scheduler": asdict(row.scheduler),
        "title": row.scheduler.title,
        "workload": asdict(row.workload.config),
        "length_source": row.workload.length_source,
        "tokens_per_second": row.tokens_per_second,
        "overload": row.overload,
        "failed": len(row.failed),
        "latest_send": row.latest_send,
        "differences": [asdict(difference) for difference in row.differences],
        "counted_differences": len(row.counted_differences),
        "counters": dict(row.counters),
        "cpu_seconds": dict(row.cpu_seconds),
        "cpu_share_elsewhere": row.elsewhere,
        "levels": {
            level: {key: asdict(summary) for key, summary in metrics.items()}
            for level, metrics in row.levels.items()
        },
        "records": [_record_document(record) for record in row.records],
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
