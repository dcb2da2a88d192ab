"""Results of a comparison with chosen speeds, for tests without a server."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_semantic_sched.bench.client import Record
from vllm_semantic_sched.bench.metrics import IdleModel
from vllm_semantic_sched.bench.results import Comparison, MixResult, Round
from vllm_semantic_sched.bench.schedulers import SchedulerSpec, parse_schedulers
from vllm_semantic_sched.bench.texts import question_source
from vllm_semantic_sched.bench.workload import (
    BenchRequest,
    Workload,
    WorkloadConfig,
    make_workload,
)

IDLE = IdleModel(0.1, 0.0, 0.01, 0.05, 0.0)


def fake_workload(requests: int = 20) -> Workload:
    """Requests with built-in questions."""
    return make_workload(WorkloadConfig(requests=requests, gap=0.01), question_source(None)[0])


def fake_records(
    workload: Workload, pace: float | Callable[[BenchRequest], float], **fields: Any
) -> list[Record]:
    """Each request is answered with `pace` seconds per token from its arrival on."""
    records = []
    for request in workload.requests:
        seconds = pace if isinstance(pace, float) else pace(request)
        times = {
            "sent": request.arrival,
            "first_token": request.arrival + seconds,
            "finish": request.arrival + seconds * request.output_tokens,
            "prompt_tokens": 20,
            "output_tokens": request.output_tokens,
            "engine_queue_seconds": 0.0,
        }
        head = (request.index, request.level, request.text_hash, request.output_tokens)
        records.append(Record(*head, request.arrival, **(times | fields)))
    return records


def fake_row(
    spec: SchedulerSpec, workload: Workload, records: list[Record], **usage: Any
) -> MixResult:
    """One round of a scheduler."""
    row = MixResult(spec, workload)
    row.add(Round(1, records, **usage), IDLE)
    return row


def add_fake_round(
    made: Comparison, workload: Workload, name: str, pace: float, number: int = 1, **usage: Any
) -> None:
    """Add a round of the scheduler `name` with `pace` seconds per token."""
    (spec,) = parse_schedulers(name, "ems")
    made.add(spec, workload, Round(number, fake_records(workload, pace), **usage))


def fake_comparison(workload: Workload, paces: Mapping[str, float]) -> Comparison:
    """One round of each scheduler with its seconds per token."""
    made = Comparison(IDLE, {"seed": 0})
    for name, pace in paces.items():
        add_fake_round(made, workload, name, pace)
    return made
