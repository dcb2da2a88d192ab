"""A whole comparison, and the JSON file that holds it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path

from vllm_semantic_sched.lab.bench import metrics
from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.rounds import MAX_STEAL, MixResult, Round
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import Workload
from vllm_semantic_sched.lab.profiling.live_engine import processor
from vllm_semantic_sched.lab.report.content import installed_versions


@dataclass
class Comparison:
    """A whole run: by mix, then by scheduler, in the order of the first round."""

    options: Mapping[str, object]
    mixes: dict[str, dict[str, MixResult]] = field(default_factory=dict)

    def add(self, scheduler: SchedulerSpec, workload: Workload, done: Round) -> None:
        rows = self.mixes.setdefault(workload.config.mix, {})
        rows.setdefault(scheduler.name, MixResult(scheduler, workload)).add(done)

    def reference(self, mix: str) -> Round | None:
        """The round that outputs are compared with: the first one of the first scheduler."""
        row = next(iter(self.mixes.get(mix, {}).values()), None)
        return row.rounds[0] if row else None

    def rows(self) -> list[MixResult]:
        """All results, mix by mix."""
        return [row for rows in self.mixes.values() for row in rows.values()]

    def failures(self) -> list[str]:
        """A sentence for each result with requests that were not answered in full."""
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
            "options": self.options,
            "max_steal": MAX_STEAL,
            "mixes": {
                mix: {name: _mix_document(row) for name, row in rows.items()}
                for mix, rows in self.mixes.items()
            },
        }
        # JSON has neither NaN nor infinity.
        text = json.dumps(document, default=_plain)
        plain = json.loads(text, parse_constant=lambda name: None)
        path.write_text(json.dumps(plain, indent=1) + "\n")


def environment() -> dict[str, object]:
    """Return the versions and the hardware that measurements depend on."""
    return {
        "versions": installed_versions("vllm", "torch", "transformers"),
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def _mix_document(row: MixResult) -> dict[str, object]:
    return {
        "scheduler": row.scheduler,
        "title": row.scheduler.title,
        "workload": row.workload.config,
        "length_source": row.workload.length_source,
        "requests": row.requests,
        "failed": len(row.failed),
        "best_round": row.best.name,
        "tokens_per_second": row.best.tokens_per_second,
        "overload": row.overload,
        "finish_order_violations": metrics.finish_order_violations(row.records),
        "fairness": metrics.fairness(row.records),
        "differences": len(row.differences),
        "counted_differences": len(row.counted_differences),
        "levels": row.levels,
        "idle_levels": row.idle_levels,
        "misread": [
            {
                "index": record.index,
                "text": row.workload.requests[record.index].text,
                "level": record.level,
                "read_level": record.read_level,
                "ttft": record.ttft,
            }
            for record in row.misread
        ],
        "rounds": [_round_document(done, row) for done in row.rounds],
    }


def _round_document(done: Round, row: MixResult) -> dict[str, object]:
    return {
        "round": done.name,
        "calm": done.calm,
        "counted": any(done is one for one in row.counted),
        "best": done is row.best,
        "steal": done.usage.steal,
        "idle_steal": done.idle_usage.steal,
        "cpu_share_elsewhere": done.usage.elsewhere,
        "tokens_per_second": done.tokens_per_second,
        "engine_cpu_seconds_per_1000_output_tokens": done.engine_seconds_per_1000,
        "steps_per_1000_output_tokens": done.steps_per_1000,
        "idle_ratio": done.idle_ratio,
        "idle_model": done.idle_model,
        "failed": len(metrics.failed(done.records)),
        "latest_send": metrics.latest_send(done.records),
        "counters": done.usage.counters,
        "cpu_seconds": done.usage.ours,
        "differences": done.differences,
        "records": done.records,
        "idle_records": done.idle,
    }


def _plain(value: object) -> object:
    if not is_dataclass(value) or isinstance(value, type):
        return str(value)
    document = asdict(value)
    if isinstance(value, Record):
        del document["token_ids"], document["margins"], document["answer"]
        document["token_hash"] = value.token_hash
    return document
