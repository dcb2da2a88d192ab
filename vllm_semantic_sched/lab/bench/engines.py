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

STOCK = "vLLM's balancing"
OURS = "by urgency"
HEADERS: dict[str, dict[str, str]] = {STOCK: {"X-Semsched-Placement": "vllm"}, OURS: {}}


@dataclass(frozen=True)
class Burst:
    """What clients saw in one round: time to first token of level 0 and mean E2E latency of the
    least urgent level, in seconds; number of requests not answered in full."""

    ttft_mean: float
    ttft_p90: float
    latency: float
    failed: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> Self:
        """The figures of a round's records; NaN where a level has no answer."""
        urgent = [record for record in records if record.level == 0]
        ttfts = [record.ttft for record in urgent if record.ttft is not None]
        last = [record for record in records if record.level == LEVELS - 1]
        return cls(
            ttft_mean=float(np.mean(ttfts)),
            ttft_p90=float(np.percentile(ttfts, 90)),
            latency=float(np.mean([record.e2e for record in last if record.finish])),
            failed=sum(not record.ok for record in records),
        )


Rounds = Mapping[str, Sequence[Burst]]
"""By who chooses the engine."""


def make_bursts(load: WorkloadConfig, rounds: int, seconds: float) -> list[list[BenchRequest]]:
    """The requests of each pair of rounds, which arrive at equal distances within `seconds`."""
    gap = seconds / load.requests
    bursts = []
    for number in range(rounds):
        requests = make_workload(replace(load, seed=load.seed + number)).requests
        bursts.append([replace(request, arrival=request.index * gap) for request in requests])
    return bursts


def parallel_args(engines: int) -> tuple[str, ...]:
    """Arguments of `vllm serve` for engines of one process each behind one API server."""
    return (
        "--data-parallel-size",
        str(engines),
        "--api-server-count",
        "1",
        "--distributed-executor-backend",
        "uni",
    )


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
    rounds: dict[str, list[Burst]] = {name: [] for name in HEADERS}
    longest = max(request.output_tokens for burst in bursts for request in burst)
    with VllmServer(config) as running:
        client = scheduler.client(running, longest, progress)
        client.send(bursts[0][: server.seats])  # warm-up
        for number, burst in enumerate(bursts):
            choosers = HEADERS if number % 2 else reversed(HEADERS)
            for name in choosers:
                sender = replace(client, headers=HEADERS[name])
                label = f"round {number + 1} of {len(bursts)}, {name}"
                rounds[name].append(Burst.of(sender.send(burst, label)))
                running.check()
    return rounds


def write_rounds(rounds: Rounds, folder: Path) -> Path:
    """Write `engines.json`; its path."""
    path = folder / "engines.json"
    document = {name: list(map(asdict, results)) for name, results in rounds.items()}
    path.write_text(json.dumps({"environment": environment(), "rounds": document}, indent=1) + "\n")
    return path


def summary(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Mean over the rounds of each figure of `Burst`, by who chooses the engine."""
    return {
        chooser: {
            "ttft_mean": float(np.mean([result.ttft_mean for result in results])),
            "ttft_p90": float(np.mean([result.ttft_p90 for result in results])),
            "latency": float(np.mean([result.latency for result in results])),
        }
        for chooser, results in rounds.items()
    }


def better_rounds(rounds: Rounds) -> int:
    """Pairs of rounds in which level 0 got its first tokens earlier by our placement."""
    pairs = zip(rounds[STOCK], rounds[OURS], strict=True)
    return sum(ours.ttft_mean < stock.ttft_mean for stock, ours in pairs)
