"""Results of a comparison with chosen speeds, for tests without a server."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.compare import idle_sample
from vllm_semantic_sched.lab.bench.results import Comparison, MixResult, Round
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec, parse_schedulers
from vllm_semantic_sched.lab.bench.usage import Usage
from vllm_semantic_sched.lab.bench.workload import (
    BenchRequest,
    Workload,
    WorkloadConfig,
    make_workload,
    question_source,
)

Pace = float | Callable[[BenchRequest], float]
IDLE_PACE = 0.05
"""Seconds per token on the idle engine."""


def fake_workload(requests: int = 20, mix: str = "even", **fields: Any) -> Workload:
    """Requests with built-in questions."""
    config = WorkloadConfig(requests=requests, gap=0.01, mix=mix, **fields)
    return make_workload(config, question_source(None)[0])


def fake_usage(
    steal: float = 0.0,
    engine_seconds: float = 2.0,
    counters: Mapping[str, float] | None = None,
    elsewhere: float = 0.0,
) -> Usage:
    """Usage of a machine with 100 s of CPU time."""
    ours = {"VLLM::EngineCore": engine_seconds, "client": 1.0}
    busy = sum(ours.values()) + 100 * elsewhere
    return Usage(dict(counters or {}), ours, busy, 100 * steal, 100.0)


def fake_idle(workload: Workload, pace: float = IDLE_PACE) -> list[Record]:
    """The idle engine's answers."""
    sample = {request.index for request in idle_sample(workload.requests)}
    return [one for one in fake_records(workload, pace) if one.index in sample]


def fake_records(workload: Workload, pace: Pace, **fields: Any) -> list[Record]:
    """Each request is answered with `pace` seconds per token from its arrival on."""
    records = []
    for request in workload.requests:
        seconds = pace if isinstance(pace, float) else pace(request)
        times = {
            "sent": request.arrival,
            "first_token": request.arrival + seconds,
            "finish": request.arrival + seconds * request.output_tokens,
            "tenant": request.tenant,
            "prompt_tokens": 20,
            "output_tokens": request.output_tokens,
            "engine_queue_seconds": 0.0,
        }
        head = (request.index, request.level, "hash", request.output_tokens)
        records.append(Record(*head, request.arrival, **(times | fields)))
    return records


def fake_row(
    spec: SchedulerSpec, workload: Workload, records: list[Record], **usage: Any
) -> MixResult:
    """One round of a scheduler."""
    row = MixResult(spec, workload)
    row.rounds.append(Round(1, records, **usage))
    return row


def add_fake_round(
    made: Comparison, workload: Workload, name: str, pace: Pace, number: int = 1, **usage: Any
) -> None:
    """Add a round of the scheduler `name` with `pace` seconds per token."""
    (spec,) = parse_schedulers(name, "ems")
    fields = {"name": f"{number}", "idle": fake_idle(workload), "usage": fake_usage()} | usage
    made.add(spec, workload, Round(number, fake_records(workload, pace), **fields))


def fake_comparison(workload: Workload, paces: Mapping[str, Pace]) -> Comparison:
    """One round of each scheduler with its seconds per token."""
    made = Comparison({"seed": 0})
    for name, pace in paces.items():
        add_fake_round(made, workload, name, pace)
    return made
