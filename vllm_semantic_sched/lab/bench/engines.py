"""Compares who chooses the engine of a request: vLLM's balancing, or our placement by urgency. One
server gets the same bursts twice, in reversed order every second time, and a header that says who
chooses: both meet the same machine, engines and caches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from vllm_semantic_sched.lab.bench.client import Progress, Record
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer, prefer_client
from vllm_semantic_sched.lab.bench.workload import (
    LEVELS,
    BenchRequest,
    WorkloadConfig,
    make_workload,
)

STOCK, OURS = "vLLM's balancing", "by urgency"
HEADERS: dict[str, dict[str, str]] = {STOCK: {"X-Semsched-Placement": "vllm"}, OURS: {}}


@dataclass(frozen=True)
class Burst:
    """What clients saw in one round: time to first token of urgency 0 and mean E2E latency of the
    least urgent level, in seconds; number of requests not answered in full."""

    ttft_mean: float
    ttft_p90: float
    latency: float
    failed: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        urgent = [one.ttft for one in records if one.level == 0 and one.ttft is not None]
        last = [one.e2e for one in records if one.level == LEVELS - 1 and one.finish]
        means = float(np.mean(urgent)), float(np.percentile(urgent, 90)), float(np.mean(last))
        return cls(*means, failed=sum(not one.ok for one in records))


Rounds = Mapping[str, Sequence[Burst]]
"""By who chooses the engine."""


def make_bursts(load: WorkloadConfig, rounds: int, seconds: float) -> list[list[BenchRequest]]:
    """The requests of each pair of rounds, which arrive at equal distances within `seconds`."""
    gap = seconds / load.requests
    loads = (make_workload(replace(load, seed=load.seed + number)) for number in range(rounds))
    return [[replace(one, arrival=one.index * gap) for one in each.requests] for each in loads]


def parallel_args(engines: int) -> tuple[str, ...]:
    """Arguments of `vllm serve` for engines of one process each behind one API server."""
    parallel = ("--data-parallel-size", str(engines), "--api-server-count", "1")
    return (*parallel, "--distributed-executor-backend", "uni")


def compare_placements(
    server: ServerConfig,
    scheduler: SchedulerSpec,
    engines: int,
    bursts: Sequence[Sequence[BenchRequest]],
    progress: Progress,
) -> Rounds:
    """Send each burst to one server with several engines, once with each of `HEADERS`."""
    config = scheduler.configure(server, server.log.parent)
    config = replace(config, scheduler_args=(*config.scheduler_args, *parallel_args(engines)))
    progress.message(f"starting a server with {engines} engines")
    prefer_client(server.nice)
    found: dict[str, list[Burst]] = {name: [] for name in HEADERS}
    longest = max(one.output_tokens for burst in bursts for one in burst)
    with VllmServer(config) as running:
        client = scheduler.client(running, longest, progress)
        client.send(bursts[0][: server.seats])  # warm-up
        for number, burst in enumerate(bursts):
            for name in HEADERS if number % 2 else reversed(HEADERS):
                sender = replace(client, headers=HEADERS[name])
                label = f"round {number + 1} of {len(bursts)}, {name}"
                found[name].append(Burst.of(sender.send(burst, label)))
                running.check()
    return found


def write_rounds(rounds: Rounds, folder: Path) -> Path:
    """Write `engines.json`; its path."""
    path = folder / "engines.json"
    document = {name: list(map(asdict, each)) for name, each in rounds.items()}
    path.write_text(json.dumps({"environment": environment(), "rounds": document}, indent=1) + "\n")
    return path


def summary(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Mean over the rounds of each figure of `Burst`, by who chooses the engine."""
    names = ("ttft_mean", "ttft_p90", "latency")
    return {
        chooser: {name: float(np.mean([getattr(one, name) for one in each])) for name in names}
        for chooser, each in rounds.items()
    }


def better_rounds(rounds: Rounds) -> int:
    """Pairs of rounds in which urgency 0 got its first tokens earlier by our placement."""
    pairs = zip(rounds[STOCK], rounds[OURS], strict=True)
    return sum(ours.ttft_mean < stock.ttft_mean for stock, ours in pairs)
