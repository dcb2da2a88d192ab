"""Measurements on an engine that has nothing else to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from vllm_semantic_sched.lab.bench.client import LoadClient, Record
from vllm_semantic_sched.lab.bench.results import DecodeStep
from vllm_semantic_sched.lab.bench.workload import BenchRequest, Workload

_URGENT, _OTHERS = 24, 4
_QUICK_URGENT, _QUICK_OTHERS = 9, 3
_DECODE_TOKENS = 64
_DECODE_REPEATS = 3


def idle_sample(requests: Sequence[BenchRequest], quick: bool = False) -> list[BenchRequest]:
    """Return the requests of urgency 0, at most 24 of them spread evenly over the load, and four
    others, from the shortest to the longest text, which show the cost of a prompt's tokens.

    Args:
        quick: at most 9 and 3 instead.
    """
    urgent = [request for request in requests if request.level == 0]
    others = sorted(
        (request for request in requests if request.level > 0),
        key=lambda request: len(request.text),
    )
    most, rest = (_QUICK_URGENT, _QUICK_OTHERS) if quick else (_URGENT, _OTHERS)
    return _spread(urgent, most) + _spread(others, rest)


def measure_idle(
    client: LoadClient, workload: Workload, label: str, quick: bool = False
) -> list[Record]:
    """Send `idle_sample` one by one. KV from the load is not reused."""

    def extras(request: BenchRequest) -> Mapping[str, Any]:
        # vLLM's prefix cache keeps requests with another salt apart.
        return {**client.extras(request), "cache_salt": "idle"}

    return replace(client, extras=extras).send_one_by_one(
        idle_sample(workload.requests, quick), label
    )


def measure_decode_step(client: LoadClient, seats: int) -> DecodeStep | None:
    """Measure the time per token of a request alone, and of `seats` equal ones together.

    Returns:
        None if the server did not answer.
    """
    requests = [
        BenchRequest(index, 0.0, 0, f"Request number {index}.", _DECODE_TOKENS)
        for index in range(seats)
    ]
    alone = client.send_one_by_one(requests[:1] * _DECODE_REPEATS)
    full = [record for _ in range(_DECODE_REPEATS) for record in client.send_together(requests)]
    if not all(record.ok for record in [*alone, *full]):
        return None
    return DecodeStep(seats, _seconds_per_token(alone), _seconds_per_token(full))


def _seconds_per_token(records: Sequence[Record]) -> float:
    return median(
        (record.finish - record.first_token) / (record.output_tokens - 1)
        for record in records
        if record.finish is not None and record.first_token is not None
    )


def _spread(requests: Sequence[BenchRequest], count: int) -> list[BenchRequest]:
    """At most `count` of the requests, evenly spaced, with the first and the last."""
    if len(requests) <= count:
        return list(requests)
    last = len(requests) - 1
    return [requests[round(place * last / (count - 1))] for place in range(count)]
