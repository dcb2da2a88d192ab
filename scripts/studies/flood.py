"""One tenant floods a real server while another one sends a few requests per second.

The quiet tenant sends all the time: first alone, then beside a flood of many times the server's
capacity, then alone again. The study compares its time to first token in the three phases; every
request of the flood must get an answer, or a refusal with a code and a time to come back. Prints
tables and writes `flood.json`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
from common import arriving_at, capacity, main, percentiles, refusal_code, serve, write_json

from vllm_semantic_sched.cli.console import make_console, print_table
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments, print_problems
from vllm_semantic_sched.lab.bench.compare import OTHER_SEED
from vllm_semantic_sched.lab.bench.metrics import latest_send
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import BenchRequest, WorkloadConfig, make_workload

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_semantic_sched.lab.bench.client import Record
    from vllm_semantic_sched.lab.bench.server import VllmServer

_LEVEL_MIX = "0:1:0:0:0"  # both tenants have the same level: only fairness distinguishes them
_RECOVERY = 5.0  # seconds after the flood in which service may still be slow
_WORST = 3.0  # largest TTFT beside the flood relative to that alone
_CAPACITY_ROUNDS = 4


def tenant_extras(quiet: int) -> Callable[[BenchRequest], Mapping[str, object]]:
    """Return what adds the tenant to a request: the first `quiet` ones are the quiet tenant's."""

    def extras(request: BenchRequest) -> Mapping[str, object]:
        tenant = "quiet" if request.index < quiet else "flood"
        return {"vllm_xargs": {"urgency": request.level, "tenant": tenant}}

    return extras


def make_load(args: argparse.Namespace, rate: float) -> tuple[list[BenchRequest], int]:
    """Return the requests of both tenants, and how many of the first ones are the quiet tenant's.
    `rate`: of the flood, in requests per second."""
    total = args.alone + args.flood + args.after
    times = [number / args.rate for number in range(int(total * args.rate))]
    quiet = _requests(args, times, args.quiet_tokens, seed=1)
    times = [args.alone + number / rate for number in range(int(args.flood * rate))]
    flood = _requests(args, times, args.flood_tokens, seed=2)
    after_quiet = [replace(request, index=len(quiet) + request.index) for request in flood]
    return [*quiet, *after_quiet], len(quiet)


def _requests(
    args: argparse.Namespace, times: Sequence[float], tokens: int, seed: int
) -> list[BenchRequest]:
    """Requests that arrive at `times`, with answers of the same length."""
    config = WorkloadConfig(requests=len(times), mix=_LEVEL_MIX, seed=args.seed + seed)
    return arriving_at(make_workload(config).requests, times, output_tokens=tokens)


def evaluate(
    args: argparse.Namespace,
    quiet: Sequence[Record],
    flood: Sequence[Record],
    rate: float,
    memory_growth: int,
) -> dict[str, Any]:
    """Return the contents of `flood.json`. `rate`: of the flood, in requests per second;
    `memory_growth`: of the server, in bytes."""
    end = args.alone + args.flood
    phases = {
        "alone": [record for record in quiet if record.arrival < args.alone],
        "beside the flood": [record for record in quiet if args.alone <= record.arrival < end],
        "after it": [record for record in quiet if record.arrival >= end + _RECOVERY],
    }
    codes = [refusal_code(record) for record in flood]
    refused = Counter(code for code in codes if code is not None)
    return {
        "flood_requests_per_second": rate,
        "quiet": {name: _phase(members) for name, members in phases.items()},
        "flood": {
            "sent": len(flood),
            "answered": sum(record.ok for record in flood),
            "refused": dict(refused),
            "neither": sum(not record.ok and refusal_code(record) is None for record in flood),
        },
        "server_memory_grown_bytes": memory_growth,
        "latest_send": latest_send([*quiet, *flood]),
    }


def _phase(records: Sequence[Record]) -> dict[str, float]:
    ttfts = [record.ttft for record in records if record.ttft is not None]
    p50, p99 = percentiles(ttfts, missing=float("inf"))
    answered = sum(record.ok for record in records)
    return {"sent": len(records), "answered": answered, "ttft_p50": p50, "ttft_p99": p99}


def problems_of(result: Mapping[str, Any]) -> list[str]:
    """Return a line for each requirement that was missed."""
    quiet = result["quiet"]
    flood = result["flood"]
    alone = quiet["alone"]
    after = quiet["after it"]
    problems = []
    if quiet["beside the flood"]["ttft_p99"] > _WORST * alone["ttft_p99"]:
        problems.append(f"p99 TTFT of the quiet tenant: more than {_WORST:g} times that alone")
    if after["ttft_p99"] > _WORST * alone["ttft_p99"]:
        problems.append(f"service is not back to normal {_RECOVERY:g} s after the flood")
    if any(phase["answered"] < phase["sent"] for phase in quiet.values()):
        problems.append("a request of the quiet tenant was not answered")
    if flood["neither"]:
        problems.append(f"{flood['neither']} requests got neither an answer nor a code")
    return problems


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print the quiet tenant's phases and what happened to the flood."""
    columns = ("", "sent", "answered", "TTFT p50, s", "TTFT p99, s", "p99 vs alone")
    alone = result["quiet"]["alone"]["ttft_p99"]
    rows = (
        (
            name,
            phase["sent"],
            phase["answered"],
            f"{phase['ttft_p50']:.3f}",
            f"{phase['ttft_p99']:.3f}",
            f"{phase['ttft_p99'] / alone:.2f}x",
        )
        for name, phase in result["quiet"].items()
    )
    print_table("the quiet tenant", columns, rows)
    flood = result["flood"]
    refused = ", ".join(f"{count} {code}" for code, count in flood["refused"].items()) or "none"
    console.print(
        f"flood: {result['flood_requests_per_second']:.0f} requests/s, {flood['sent']} sent, "
        f"{flood['answered']} answered, refused: {refused}; {flood['neither']} neither\n"
        f"server memory grew by {result['server_memory_grown_bytes'] / 2**20:.0f} MiB; latest "
        f"send {result['latest_send']:.2f} s",
        soft_wrap=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="fairness", help="name or YAML file (default: %(default)s)")
    add("--alone", type=float, default=40.0, help="seconds before the flood (%(default)s)")
    add("--flood", type=float, default=40.0, help="seconds of the flood (default: %(default)s)")
    add("--after", type=float, default=30.0, help="seconds after it (default: %(default)s)")
    add("--rate", type=float, default=2.0, help="the quiet tenant's requests/s (%(default)s)")
    add("--overload", type=float, default=20.0, help="the flood over capacity (%(default)s)")
    add("--quiet-tokens", type=int, default=32, help="its answers (default: %(default)s)")
    add("--flood-tokens", type=int, default=384, help="the flood's answers (%(default)s)")
    add("--seed", type=int, default=0, help="of the texts (default: %(default)s)")


def memory_bytes(server: VllmServer) -> int:
    """Return the resident memory of all processes of the server."""
    leader = psutil.Process(server.pid)
    family = [leader, *leader.children(recursive=True)]
    return sum(process.memory_info().rss for process in family)


def run(args: argparse.Namespace) -> int:
    """Run the flood; 1 if a requirement is missed."""
    spec = SchedulerSpec("semantic-true", "semantic-true", args.policy)
    with serve(args, spec, max(args.flood_tokens, args.quiet_tokens)) as (server, client):
        count = _CAPACITY_ROUNDS * args.seats
        sample = _requests(args, [0.0] * count, args.flood_tokens, seed=OTHER_SEED)
        client = replace(client, extras=tenant_extras(count))
        rate = args.overload * capacity(client, sample)
        requests, quiet = make_load(args, rate)
        client = replace(client, extras=tenant_extras(quiet))
        memory = memory_bytes(server)
        records = client.send(requests, "flood")
        server.check()
        growth = memory_bytes(server) - memory
    of_quiet = [record for record in records if record.index < quiet]
    of_flood = [record for record in records if record.index >= quiet]
    result = evaluate(args, of_quiet, of_flood, rate, growth)
    write_json(args.output / "flood.json", result)
    console = make_console()
    print_result(console, result)
    return print_problems(console, problems_of(result))


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
