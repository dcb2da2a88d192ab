"""Runs the same workload through several schedulers, one server each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from vllm_semantic_sched.bench.client import LoadClient, Progress
from vllm_semantic_sched.bench.metrics import Difference, differences, explain, fit_idle, throughput
from vllm_semantic_sched.bench.results import Comparison, Round
from vllm_semantic_sched.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.bench.server import ServerConfig, VllmServer, prefer_client
from vllm_semantic_sched.bench.workload import BenchRequest, Workload, make_workload

SPARE_TOKENS = 16
"""Tokens between the longest answer and `max_tokens`, the same for every request."""
CAPACITY_ROUNDS = 6
"""Requests per seat in a measurement of capacity: makes filling and emptying seats negligible."""
OTHER_SEED = 1_000_003
"""Added to the seed of a workload for requests of the same kind that it does not contain."""

_WARM_UP_REQUESTS = 24
_IDLE_REQUESTS = 24
_IDLE_TOKENS = 128  # longer answers would add nothing to a straight line
_PREEMPTIONS = "vllm:num_preemptions_total"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.eE\d]+)$")


@dataclass(frozen=True)
class RunPlan:
    """What a comparison runs, checked before the first server starts.

    With `overload`, the gaps of the workloads are set so that they offer that many times the
    output tokens per second that the first server can give. Every scheduler runs `rounds` times,
    in reversed order in every second round: if the speed of the machine drifts steadily, it is on
    average over two rounds the same for all of them.

    Raises:
        ValueError: no scheduler, no workload or no round.
    """

    server: ServerConfig
    schedulers: Sequence[SchedulerSpec]
    workloads: Sequence[Workload]
    output: Path
    overload: float | None
    eos_token: int
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.schedulers or not self.workloads:
            raise ValueError("a comparison needs at least one scheduler, workload and round")

    def servers(self) -> Iterator[tuple[int, SchedulerSpec]]:
        """Yield the round (from 1) and the scheduler of each server in the order of their start."""
        for number in range(1, self.rounds + 1):
            for spec in self.schedulers if number % 2 else reversed(self.schedulers):
                yield number, spec


def end_token(model: Path) -> int:
    """Return the model's end token.

    Raises:
        ValueError: `config.json` has none.
    """
    token = json.loads((model / "config.json").read_text()).get("eos_token_id")
    if isinstance(token, list):
        token = token[0] if token else None
    if not isinstance(token, int):
        raise ValueError(f"{model / 'config.json'} names no eos_token_id")
    return token


def compare(
    plan: RunPlan, options: Mapping[str, object], progress: Progress | None = None
) -> Comparison:
    """Run every workload on every scheduler, in every round.

    The idle engine and the capacity are measured once, with the first scheduler. Writes
    `results.json` after each server, so that an interrupted run is not lost, and the servers'
    logs beside it.

    Args:
        options: recorded in `results.json`.

    Raises:
        ServerFailed: a server did not start or ended by itself.
        ValueError: the idle engine answered too few requests to compare with.
    """
    progress = progress or Progress()
    comparison: Comparison | None = None
    workloads = plan.workloads
    prefer_client(plan.server.nice)
    for number, spec in plan.servers():
        place = f"{spec.name}, round {number}/{plan.rounds}" if plan.rounds > 1 else spec.name
        progress.message(f"starting the server: {place}")
        with VllmServer(spec.configure(plan.server, plan.output, number)) as server:
            client = LoadClient(
                url=server.url,
                eos_token=plan.eos_token,
                max_tokens=plan.workloads[0].config.max_output_tokens + SPARE_TOKENS,
                extras=spec.body_extras,
                progress=progress,
            )
            client.send_together(_other_requests(plan, _WARM_UP_REQUESTS, "even", 32))
            if comparison is None:
                requests = _other_requests(plan, _IDLE_REQUESTS, "1:1:1:1:2", _IDLE_TOKENS)
                alone = client.send_one_by_one(requests, "one by one on the idle engine")
                comparison = Comparison(fit_idle(alone), options)
                workloads = _set_pace(client, plan)
            for workload in workloads:
                mix = workload.config.mix
                done = _measure(number, workload, server, client, f"{place}, {mix}")
                reference = comparison.reference(mix)
                if reference is not None:
                    found = _differences(reference, done, workload, client)
                    done = replace(done, differences=found)
                comparison.add(spec, workload, done)
        comparison.write(plan.output / "results.json")
    assert comparison is not None
    return comparison


def _set_pace(client: LoadClient, plan: RunPlan) -> Sequence[Workload]:
    """The workloads at the wanted overload, whatever the speed of this machine."""
    if plan.overload is None:
        return plan.workloads
    like = plan.workloads[0].config
    count = CAPACITY_ROUNDS * plan.server.seats
    requests = _other_requests(plan, count, like.mix, like.max_output_tokens)
    capacity = throughput([client.send_together(requests, "capacity")])
    if capacity <= 0:
        raise ValueError("the first server answered no request")
    paced = []
    for workload in plan.workloads:
        burst = workload.config.max_burst / 2 * workload.output_tokens / len(workload.requests)
        gap = burst / (plan.overload * capacity)
        paced.append(make_workload(replace(workload.config, gap=gap)))
    return paced


def _differences(
    reference: Round, done: Round, workload: Workload, client: LoadClient
) -> list[Difference]:
    """Differing outputs with their margins.

    Each of these requests is sent again with log-probabilities: in the measured run they would
    slow the server down.
    """
    found = differences(reference.records, done.records)
    if not found:
        return found
    wanted = {difference.index for difference in found}
    requests = [request for request in workload.requests if request.index in wanted]
    repeated = client.send_one_by_one(requests, record_margins=True)
    again = {record.index: record for record in repeated}
    answers = {record.index: record for record in done.records}
    return [explain(item, answers[item.index], again[item.index]) for item in found]


def _other_requests(
    plan: RunPlan, count: int, mix: str, max_tokens: int
) -> tuple[BenchRequest, ...]:
    """Requests of the same kind that the measured workloads do not contain."""
    like = plan.workloads[0].config
    other = replace(like, mix=mix, seed=like.seed + OTHER_SEED, max_output_tokens=max_tokens)
    return make_workload(replace(other, requests=count)).requests


def _measure(
    number: int, workload: Workload, server: VllmServer, client: LoadClient, label: str
) -> Round:
    before = _Usage.now(server)
    records = client.send(workload.requests, label)
    server.check()
    after = _Usage.now(server)
    ours = _difference(after.ours, before.ours)
    busy = after.machine_busy - before.machine_busy
    return Round(
        number,
        records,
        counters=_difference(after.counters, before.counters),
        cpu_seconds=ours,
        machine_seconds=after.machine_total - before.machine_total,
        elsewhere_seconds=max(0.0, busy - sum(ours.values())),
    )


@dataclass(frozen=True)
class _Usage:
    """Counters at one moment; CPU times are in seconds."""

    counters: Mapping[str, float]
    ours: Mapping[str, float]
    machine_busy: float
    machine_total: float

    @classmethod
    def now(cls, server: VllmServer) -> _Usage:
        own = psutil.Process().cpu_times()
        machine = psutil.cpu_times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        # Guest time is part of user time and would count twice.
        total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        return cls(
            counters=read_counters(server.get_text("/metrics")),
            ours={**server.cpu_seconds(), "client": own.user + own.system},
            machine_busy=total - idle,
            machine_total=total,
        )


def read_counters(metrics: str) -> dict[str, float]:
    """Parse vLLM's preemptions and the scheduler's counters from /metrics, summed over labels."""
    values: dict[str, float] = {}
    for line in metrics.splitlines():
        match = _SAMPLE.match(line)
        if not match or not match[1].endswith("_total"):  # a gauge has no meaningful difference
            continue
        if match[1] == _PREEMPTIONS or match[1].startswith("semsched:"):
            values[match[1]] = values.get(match[1], 0.0) + float(match[2])
    return values


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
