"""Results of a comparison: rounds by mix and scheduler, figures from them, and the JSON file."""

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path

from vllm_semantic_sched.lab.bench import metrics
from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.device_use import LABEL, DeviceUse
from vllm_semantic_sched.lab.bench.metrics import Difference, LevelValues, Summary, summarize
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.usage import STEPS, Usage
from vllm_semantic_sched.lab.bench.workload import Workload
from vllm_semantic_sched.lab.profiling.live_engine import processor
from vllm_semantic_sched.lab.report.content import installed_versions

MAX_STEAL = 0.03
"""Largest steal of a calm round."""

_NOTHING = Usage({}, {}, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Round:
    """One pass of one scheduler over one mix. `number` counts from 1; `name` is that of the visit
    (see `compare.Visit`). `records` are in the order of the workload; `idle` are some of the
    same requests, sent one by one after the load. `usage` and `idle_usage` are of the two;
    `differences` are outputs that differ from those of the reference's first round; `device`: what
    an emulated one did until the last arrival."""

    number: int
    records: Sequence[Record]
    name: str = "1"
    idle: Sequence[Record] = ()
    usage: Usage = _NOTHING
    idle_usage: Usage = _NOTHING
    differences: Sequence[Difference] = ()
    device: DeviceUse | None = None

    @property
    def steal(self) -> float:
        """The larger of the shares taken away during the load and on the idle engine."""
        return max(self.usage.steal, self.idle_usage.steal)

    @property
    def calm(self) -> bool:
        """Whether the hypervisor took at most `MAX_STEAL` away."""
        return self.steal <= MAX_STEAL

    @property
    def output_tokens(self) -> int:
        """Sum over all answers."""
        return sum(record.output_tokens for record in self.records)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second from the first arrival to the last finish."""
        return metrics.throughput(self.records)

    @property
    def engine_seconds_per_1000(self) -> float:
        """EngineCore's CPU seconds per 1,000 output tokens; NaN if not known."""
        return self._per_1000(self.usage.engine_seconds)

    @property
    def steps_per_1000(self) -> float:
        """Engine steps per 1,000 output tokens; NaN if not known."""
        return self._per_1000(self.usage.counters.get(STEPS, 0.0))

    @cached_property
    def idle_model(self) -> metrics.IdleModel | None:
        """None if too few requests were sent one by one."""
        return metrics.fit_idle(self.idle)

    @cached_property
    def values(self) -> LevelValues:
        """Metrics of the requests of the load."""
        return metrics.by_level(self.records, self.idle_model)

    @cached_property
    def idle_values(self) -> LevelValues:
        """Metrics of the requests that were sent one by one."""
        return metrics.by_level(self.idle, self.idle_model)

    @property
    def idle_ratio(self) -> float:
        """Level 0: mean normalized waiting time over the idle engine's for the same requests."""
        alone = {
            record.index: record.normalized_waiting
            for record in self.idle
            if record.ok and record.level == 0
        }
        loaded = [
            record.normalized_waiting
            for record in self.records
            if record.ok and record.index in alone
        ]
        if not alone or len(loaded) != len(alone):
            return math.nan
        return sum(loaded) / sum(alone.values())

    def milliseconds_per_request(self, process: str) -> float:
        """A process's CPU time for each request; NaN if not known."""
        used = self.usage.ours.get(process, 0.0)
        return 1000 * used / len(self.records) if used and self.records else math.nan

    def _per_1000(self, amount: float) -> float:
        return 1000 * amount / self.output_tokens if amount and self.output_tokens else math.nan


@dataclass
class MixResult:
    """One scheduler under one mix of levels. Every figure is of the `best` round, except p99, which
    needs more requests than a round has: it is over all `counted` rounds."""

    scheduler: SchedulerSpec
    workload: Workload
    rounds: list[Round] = field(default_factory=list)

    @property
    def levels(self) -> dict[str, dict[str, Summary]]:
        """By level ("0" to "4" and "all") and metric."""
        return _summaries(self.best.values, [done.values for done in self.counted])

    @property
    def idle_levels(self) -> dict[str, dict[str, Summary]]:
        """As `levels`, of the requests that were sent one by one."""
        return _summaries(self.best.idle_values, [done.idle_values for done in self.counted])

    @property
    def best(self) -> Round:
        """The round with the least steal in whole percent; of several, the one in which EngineCore
        took the least CPU time. No latency has a say in it."""
        return min(
            self.rounds, key=lambda done: (round(100 * done.steal), done.usage.engine_seconds)
        )

    @property
    def counted(self) -> list[Round]:
        """The calm rounds; if there is none, the best round."""
        return [done for done in self.rounds if done.calm] or [self.best]

    @property
    def records(self) -> Sequence[Record]:
        """Those of the best round, in the order of the workload."""
        return self.best.records

    @property
    def requests(self) -> int:
        """Number of requests sent, in all rounds."""
        return sum(len(done.records) for done in self.rounds)

    @property
    def failed(self) -> list[Record]:
        """Requests of all rounds that were not answered in full."""
        return [record for done in self.rounds for record in done.records if not record.ok]

    @property
    def latest_send(self) -> float:
        """The largest of all rounds; see `metrics.latest_send`."""
        return max(metrics.latest_send(done.records) for done in self.rounds)

    @property
    def overload(self) -> float:
        """Offered output tokens per second divided by those served."""
        source = self.best if self.workload.config.natural else self.workload
        # One gap for every burst, including the last.
        seconds = self.workload.requests[-1].arrival + self.workload.config.gap
        served = self.best.tokens_per_second
        return source.output_tokens / max(seconds, 1e-9) / served if served else math.inf

    @property
    def differences(self) -> list[Difference]:
        """Outputs of all rounds that differ from the reference's first round."""
        return [difference for done in self.rounds for difference in done.differences]

    @property
    def counted_differences(self) -> list[Difference]:
        """Differing outputs that rounding does not explain."""
        return [difference for difference in self.differences if difference.counts]

    @property
    def misread(self) -> list[Record]:
        """Level 0, counted rounds: requests that were read as less urgent."""
        return [record for record in self._urgent() if record.read_level]

    def p99_ttft(self) -> float:
        """Return p99 TTFT of level 0 in the counted rounds, in seconds."""
        return summarize(self.urgent_waits()).p99

    def urgent_waits(self) -> list[float]:
        """TTFT in seconds of each answered request of level 0 in the counted rounds."""
        answered = [record for record in self._urgent() if record.ok]
        return [record.ttft for record in answered if record.ttft is not None]

    def _urgent(self) -> Iterator[Record]:
        """Level 0 of the counted rounds."""
        for done in self.counted:
            yield from (record for record in done.records if record.level == 0)


def _summaries(best: LevelValues, counted: Sequence[LevelValues]) -> dict[str, dict[str, Summary]]:
    def summary(level: str, metric: str) -> Summary:
        in_all: list[float] = []
        for values in counted:
            if level in values:
                in_all += values[level][metric]
        return summarize(best[level][metric], in_all)

    return {level: {metric: summary(level, metric) for metric in best[level]} for level in best}


Rows = Mapping[str, MixResult]
"""Results of one mix by scheduler."""


@dataclass
class Comparison:
    """A whole run: by mix, then by scheduler, in the order of the first round."""

    options: Mapping[str, object]
    mixes: dict[str, dict[str, MixResult]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What must be said wherever a figure is shown; empty for a real device."""
        return LABEL if self.options.get("device") else ""

    def add(self, scheduler: SchedulerSpec, workload: Workload, done: Round) -> None:
        """Add a round to the results of its mix and scheduler."""
        rows = self.mixes.setdefault(workload.config.mix, {})
        rows.setdefault(scheduler.name, MixResult(scheduler, workload)).rounds.append(done)

    def reference(self, mix: str) -> Round | None:
        """The round that outputs are compared with: the first one of the first scheduler."""
        row = next(iter(self.mixes.get(mix, {}).values()), None)
        return row.rounds[0] if row else None

    def rows(self) -> list[MixResult]:
        """Results of all mixes and schedulers, in order."""
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
            "label": self.label,
            "environment": environment(),
            "options": self.options,
            "max_steal": MAX_STEAL,
            "mixes": {
                mix: {name: _mix_document(row) for name, row in rows.items()}
                for mix, rows in self.mixes.items()
            },
        }
        # JSON has neither NaN nor infinity.
        plain = json.loads(json.dumps(document, default=_plain), parse_constant=lambda name: None)
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
    counted = any(done is counted_round for counted_round in row.counted)
    return {
        "round": done.name,
        "calm": done.calm,
        "counted": counted,
        "best": done is row.best,
        "steal": done.usage.steal,
        "idle_steal": done.idle_usage.steal,
        "cpu_share_elsewhere": done.usage.elsewhere,
        "tokens_per_second": done.tokens_per_second,
        "engine_cpu_seconds_per_1000_output_tokens": done.engine_seconds_per_1000,
        "steps_per_1000_output_tokens": done.steps_per_1000,
        "idle_ratio": done.idle_ratio,
        "idle_model": done.idle_model,
        "failed": sum(not record.ok for record in done.records),
        "latest_send": metrics.latest_send(done.records),
        "counters": done.usage.counters,
        "device": done.device,
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
        for name in ("token_ids", "margins", "answer"):
            del document[name]
        tokens = json.dumps(value.token_ids).encode()
        document["token_hash"] = hashlib.sha256(tokens).hexdigest()[:12]
    return document
