"""The same workload through several schedulers, one server each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from vllm_semantic_sched.bench.client import ClientConfig, send_one_by_one, send_open_loop
from vllm_semantic_sched.bench.metrics import (
    Difference,
    IdleModel,
    differences,
    explain,
    fit_idle,
    throughput,
)
from vllm_semantic_sched.bench.results import Comparison, Round
from vllm_semantic_sched.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.bench.server import ServerConfig, VllmServer, prefer_client
from vllm_semantic_sched.bench.workload import BenchRequest, Workload, make_workload

_WARM_UP_REQUESTS = 24
_IDLE_REQUESTS = 24
_CAPACITY_ROUNDS = 6  # requests per seat, so that filling and emptying the seats weigh little
_IDLE_TOKENS = 128  # longer answers would tell nothing new about a straight line
# Room between the longest answer and max_tokens, the same for every request.
_SPARE_TOKENS = 16
_PREEMPTIONS = "vllm:num_preemptions_total"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.eE\d]+)$")


@dataclass(frozen=True)
class RunPlan:
    """Everything a comparison needs, checked before the first server starts.

    With `overload`, the workloads' gap is set so that they offer that many times the output
    tokens per second that the first server can give. All schedulers are run `rounds` times, in
    reversed order in every second round: a machine whose speed drifts steadily is then, over two
    rounds, equally fast for all of them.

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
        """Round (from 1) and scheduler of every server, in the order they are started."""
        for number in range(1, self.rounds + 1):
            for spec in self.schedulers if number % 2 else reversed(self.schedulers):
                yield number, spec


def end_token(model: Path) -> int:
    """The model's end token.

    Raises:
        ValueError: `config.json` names none.
    """
    token = json.loads((model / "config.json").read_text()).get("eos_token_id")
    if isinstance(token, list):
        token = token[0] if token else None
    if not isinstance(token, int):
        raise ValueError(f"{model / 'config.json'} names no eos_token_id")
    return token


def compare(plan: RunPlan, options: Mapping[str, object], progress: bool) -> Comparison:
    """Run every workload on every scheduler, in every round.

    The idle engine and the capacity are measured once, with the first scheduler. Writes
    `results.json` after each server, so that an interrupted run is not lost, and the servers'
    logs beside it.

    Raises:
        ServerFailed: a server did not start or ended by itself.
        ValueError: the idle engine answered too few requests to compare with.
    """
    comparison: Comparison | None = None
    workloads = plan.workloads
    prefer_client(plan.server.nice)
    for number, spec in plan.servers():
        place = f"{spec.name}, round {number}/{plan.rounds}" if plan.rounds > 1 else spec.name
        if progress:
            print(f"starting the server: {place}", flush=True)
        # A policy may be given as a path: nothing of it but words belongs into a file name.
        log = f"server-{re.sub(r'[^A-Za-z0-9.]+', '-', spec.name)}-{number}.log"
        config = replace(plan.server, log=plan.output / log, scheduler_args=spec.server_args())
        with VllmServer(config) as server:
            client = ClientConfig(
                url=server.url,
                eos_token=plan.eos_token,
                max_tokens=plan.workloads[0].config.max_output_tokens + _SPARE_TOKENS,
                progress="" if progress else None,
            )
            _warm_up(spec, client, plan)
            if comparison is None:
                comparison = Comparison(_idle(spec, client, plan), options)
                workloads = _paced(spec, client, plan)
            for workload in workloads:
                mix = workload.config.mix
                label = f"{place}, {mix}" if progress else None
                done = _measure(number, spec, workload, server, replace(client, progress=label))
                reference = comparison.reference(mix)
                if reference is not None:
                    found = _differences(reference, done, spec, workload, client)
                    done = replace(done, differences=found)
                comparison.add(spec, workload, done)
        comparison.write(plan.output / "results.json")
    assert comparison is not None
    return comparison


def _label(client: ClientConfig, text: str) -> str | None:
    return None if client.progress is None else text


def _warm_up(spec: SchedulerSpec, client: ClientConfig, plan: RunPlan) -> None:
    requests = _other_requests(plan, _WARM_UP_REQUESTS, "even", 32)
    together = [replace(request, arrival=0.0) for request in requests]
    client = replace(client, progress=None)
    asyncio.run(send_open_loop(together, client, spec.body_extras))


def _idle(spec: SchedulerSpec, client: ClientConfig, plan: RunPlan) -> IdleModel:
    requests = _other_requests(plan, _IDLE_REQUESTS, "1:1:1:1:2", _IDLE_TOKENS)
    client = replace(client, progress=_label(client, "one by one on the idle engine"))
    return fit_idle(asyncio.run(send_one_by_one(requests, client, spec.body_extras)))


def _paced(spec: SchedulerSpec, client: ClientConfig, plan: RunPlan) -> Sequence[Workload]:
    """The workloads at the wanted overload, whatever the speed of this machine."""
    if plan.overload is None:
        return plan.workloads
    like = plan.workloads[0].config
    count = _CAPACITY_ROUNDS * plan.server.seats
    requests = _other_requests(plan, count, like.mix, like.max_output_tokens)
    together = [replace(request, arrival=0.0) for request in requests]
    client = replace(client, progress=_label(client, "capacity"))
    capacity = throughput([asyncio.run(send_open_loop(together, client, spec.body_extras))])
    if capacity <= 0:
        raise ValueError("the first server answered no request")
    paced = []
    for workload in plan.workloads:
        burst = workload.config.max_burst / 2 * workload.output_tokens / len(workload.requests)
        gap = burst / (plan.overload * capacity)
        paced.append(make_workload(replace(workload.config, gap=gap)))
    return paced


def _differences(
    reference: Round, done: Round, spec: SchedulerSpec, workload: Workload, client: ClientConfig
) -> list[Difference]:
    """Differing outputs with their margins: each is sent again, with log-probabilities.

    Asking for them in the measured run would slow it down.
    """
    found = differences(reference.records, done.records)
    if not found:
        return found
    wanted = {difference.index for difference in found}
    requests = [request for request in workload.requests if request.index in wanted]
    repeated = asyncio.run(
        send_one_by_one(requests, replace(client, record_margins=True), spec.body_extras)
    )
    again = {record.index: record for record in repeated}
    answers = {record.index: record for record in done.records}
    return [explain(item, answers[item.index], again[item.index]) for item in found]


def _other_requests(
    plan: RunPlan, count: int, mix: str, max_tokens: int
) -> tuple[BenchRequest, ...]:
    """Requests of the same kind that the measured workloads do not contain."""
    like = plan.workloads[0].config
    return make_workload(
        replace(
            like, requests=count, mix=mix, seed=like.seed + 1_000_003, max_output_tokens=max_tokens
        )
    ).requests


def _measure(
    number: int,
    spec: SchedulerSpec,
    workload: Workload,
    server: VllmServer,
    client: ClientConfig,
) -> Round:
    before = _Usage.now(server)
    records = asyncio.run(send_open_loop(workload.requests, client, spec.body_extras))
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
    """Counters at one moment; CPU times in seconds."""

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
    """vLLM's preemptions and every plain counter of the scheduler, summed over labels."""
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
