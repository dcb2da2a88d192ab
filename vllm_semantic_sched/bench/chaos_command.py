"""`semsched bench chaos`: disturb a real server in every way at once and see what holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.admin.client import AdminClient
from vllm_semantic_sched.bench.schedulers import swap_arguments

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.chaos import Report
    from vllm_semantic_sched.bench.server import VllmServer

OURS = ("--scheduler-cls", "vllm_semantic_sched.SemanticScheduler")
MIDDLEWARE = ("--middleware", "vllm_semantic_sched.Middleware")

BASE_POLICY = """\
tiers:
  - {name: immediate, reserve: {seats: 1, mode: soft}, slo: {ttft: 5}}
  - {name: emergent}
  - {name: urgent, share: 0.3}
  - {name: semi, queue: {requests: 30, timeout: 20}}
  - {name: routine, queue: {requests: 20, timeout: 10}, shed_order: 1}
dedup: {enabled: true}
admission: {queue: {requests: 60}}
aging: {enabled: true, interval: 2}
deadlines: {enabled: true}
fair_share: {enabled: true}
shedding: {enabled: true}
"""
"""What the policy file says throughout: everything on."""

# Metrics that are zero on a server with nothing to do.
_ZERO_WHEN_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "semsched:host_pool_usage",
    "semsched:host_copies",
)
_ENDED = ("semsched:ended_requests_total",)
_ALWAYS_ZERO = ("semsched:policy_errors_total",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench chaos`."""
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for the policy file and the log")
    add("--requests", type=int, default=2000, help="of the disturbed run (%(default)s)")
    add("--cases", type=int, default=120, help="distinct ones among them (%(default)s)")
    add("--at-a-time", type=int, default=40, help="requests under way (%(default)s)")
    add("--seats", type=int, default=8, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=40, help="KV blocks of 32 tokens (%(default)s)")
    add(
        "--host-gib",
        type=float,
        default=0.003,
        help="host memory for KV of preempted requests; 0: it is computed again (%(default)s: "
        "often full)",
    )
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """1 if anything that must hold did not."""
    from vllm_semantic_sched.bench.chaos import summary
    from vllm_semantic_sched.bench.server import ServerConfig, VllmServer

    args.output.mkdir(parents=True, exist_ok=True)
    policy = args.output / "policy.yaml"
    policy.write_text(BASE_POLICY)
    config = ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks,
        scheduler_args=server_arguments(policy, args.host_gib),
    )
    with VllmServer(config) as server:
        report = disturb(server, policy, args.requests, args.cases, args.at_a_time, args.seed)
    print("\n".join(summary(report)))
    return 1 if report.problems else 0


def server_arguments(policy: Path, host_gib: float = 0.0) -> tuple[str, ...]:
    """Arguments of a server that can be disturbed."""
    settings = json.dumps({"semantic_sched": {"policy": str(policy)}})
    arguments = (*OURS, *MIDDLEWARE, "--additional-config", settings)
    if not host_gib:
        return arguments
    return (*arguments, *swap_arguments(host_gib))


def disturb(
    server: VllmServer,
    policy: Path,
    requests: int,
    cases: int,
    at_a_time: int,
    seed: int = 0,
    pace: float = 1.0,
    api_key: str | None = None,
) -> Report:
    """Both runs against a running server, and the check of what is left on it."""
    import asyncio

    from vllm_semantic_sched.bench.chaos import Chaos, make_cases, make_visits

    base = policy.read_text()
    chaos = Chaos(server.url, policy, base, lambda: kill_predictor(server), api_key, seed)
    known = make_cases(cases, seed)
    visits = make_visits(requests, cases, seed)

    async def both() -> None:
        await chaos.run(known, visits, at_a_time, pace)
        await chaos.settle(lambda: _left(server, api_key))

    errors_before = _sum(server, _ALWAYS_ZERO)
    try:
        asyncio.run(both())
    finally:
        policy.write_text(base)
    server.check()
    errors = _sum(server, _ALWAYS_ZERO) - errors_before
    if errors:
        chaos.report.problems.append(f"{errors:g} guarded errors; see {server.config.log}")
    return chaos.report


def kill_predictor(server: VllmServer) -> bool:
    """SIGKILL the server's predictor; False if it has none at the moment."""
    import psutil

    from vllm_semantic_sched.bench.server import PREDICTOR

    if server.pid is None:
        return False
    for process in psutil.Process(server.pid).children(recursive=True):
        try:
            if PREDICTOR in process.cmdline():
                process.kill()
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def _left(server: VllmServer, api_key: str | None) -> dict[str, float]:
    """What is left on the server by its own accounts."""
    left = {name: _sum(server, (name,)) for name in _ZERO_WHEN_IDLE}
    arrived, ended = _sum(server, ("semsched:requests_total",)), _sum(server, _ENDED)
    left["requests that ended more or less than once"] = arrived - ended
    for engine in AdminClient(server.url, api_key).status():
        left["jobs"] = left.get("jobs", 0.0) + engine["jobs"]
    return left


def _sum(server: VllmServer, names: tuple[str, ...]) -> float:
    lines = server.get_text("/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))
