"""`semsched bench flood`: one tenant floods the server while another goes on as before.

The quiet tenant sends a few requests a second all the time: first alone, then beside a flood of
many times what the engine can serve, then alone again. Its time to first token beside the flood
is compared with that alone; every request of the flood must end with an answer or with a status
and a time to come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.bench.options import add_server_arguments, make_server
from vllm_semantic_sched.bench.tier_table import refusal_code
from vllm_semantic_sched.bench.tiers import MIDDLEWARE, SPARE_TOKENS

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.client import Record
    from vllm_semantic_sched.bench.workload import BenchRequest

_LEVEL_MIX = "0:1:0:0:0"  # both tenants are of the same tier: only fairness tells them apart
_POLICY = "fairness"
_RECOVERY = 5.0  # seconds after the flood in which service may still be slow
_WORST = 3.0  # TTFT beside the flood over TTFT alone
_CAPACITY_ROUNDS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench flood`."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default=_POLICY, help="name or YAML file (default: %(default)s)")
    add("--alone", type=float, default=40.0, help="seconds before the flood (%(default)s)")
    add("--flood", type=float, default=40.0, help="seconds of the flood (default: %(default)s)")
    add("--after", type=float, default=30.0, help="seconds after it (default: %(default)s)")
    add("--rate", type=float, default=2.0, help="the quiet tenant's requests/s (%(default)s)")
    add("--overload", type=float, default=20.0, help="the flood over capacity (%(default)s)")
    add("--quiet-tokens", type=int, default=32, help="its answers (default: %(default)s)")
    add("--flood-tokens", type=int, default=384, help="the flood's answers (%(default)s)")
    add("--seed", type=int, default=0, help="of the texts (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the flood; 1 if a promise is broken."""
    from vllm_semantic_sched.bench.client import ClientConfig, send_open_loop
    from vllm_semantic_sched.bench.compare import end_token
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.metrics import duration
    from vllm_semantic_sched.bench.report import print_problems
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec
    from vllm_semantic_sched.bench.server import VllmServer, prefer_client

    args.output.mkdir(parents=True, exist_ok=True)
    spec = SchedulerSpec("semantic-true", "semantic-true", args.policy, MIDDLEWARE)
    config = replace(make_server(args), scheduler_args=spec.server_args())
    prefer_client(args.nice)
    print("starting the server", flush=True)
    with VllmServer(config) as server:
        client = ClientConfig(
            url=server.url,
            eos_token=end_token(args.model),
            max_tokens=max(args.flood_tokens, args.quiet_tokens) + SPARE_TOKENS,
            progress=None if args.quiet else "capacity",
        )
        count = _CAPACITY_ROUNDS * args.seats
        sample = _requests(args, count, [0.0] * count, args.flood_tokens, seed=1_000_003)
        done = asyncio.run(send_open_loop(sample, client, _Extras(sample, [])))
        rate = args.overload * len(done) / duration(done)
        requests, extras = _load(args, rate)
        memory = server.memory_bytes()
        progress = None if args.quiet else "flood"
        records = asyncio.run(send_open_loop(requests, replace(client, progress=progress), extras))
        server.check()
        grown = server.memory_bytes() - memory
    quiet = [one for one in records if one.index < len(extras.quiet)]
    flood = [one for one in records if one.index >= len(extras.quiet)]
    result = _result(args, quiet, flood, rate, grown)
    (args.output / "flood.json").write_text(json.dumps(result, indent=1))
    console = make_console()
    _print(console, result)
    return print_problems(console, _problems(result))


class _Extras:
    """Whose a request is, by its index: those of the quiet tenant come first."""

    def __init__(self, quiet: Sequence[BenchRequest], flood: Sequence[BenchRequest]) -> None:
        self.quiet = quiet
        self.flood = flood

    def __call__(self, request: BenchRequest) -> Mapping[str, object]:
        tenant = "quiet" if request.index < len(self.quiet) else "flood"
        return {"vllm_xargs": {"urgency": request.level, "tenant": tenant}}


def _load(args: argparse.Namespace, rate: float) -> tuple[list[BenchRequest], _Extras]:
    total = args.alone + args.flood + args.after
    times = [number / args.rate for number in range(int(total * args.rate))]
    quiet = _requests(args, len(times), times, args.quiet_tokens, seed=1)
    count = int(args.flood * rate)
    times = [args.alone + number / rate for number in range(count)]
    flood = _requests(args, count, times, args.flood_tokens, seed=2)
    flood = [replace(one, index=len(quiet) + one.index) for one in flood]
    return [*quiet, *flood], _Extras(quiet, flood)


def _requests(
    args: argparse.Namespace, count: int, times: Sequence[float], tokens: int, seed: int
) -> list[BenchRequest]:
    """Requests that leave at `times` and want answers of the same length."""
    from vllm_semantic_sched.bench.load import WorkloadConfig
    from vllm_semantic_sched.bench.workload import make_workload

    load = make_workload(WorkloadConfig(requests=count, mix=_LEVEL_MIX, seed=args.seed + seed))
    return [
        replace(one, arrival=time, output_tokens=tokens)
        for one, time in zip(load.requests, times, strict=True)
    ]


def _result(
    args: argparse.Namespace,
    quiet: Sequence[Record],
    flood: Sequence[Record],
    rate: float,
    grown: int,
) -> dict[str, Any]:
    end = args.alone + args.flood
    phases = {
        "alone": [one for one in quiet if one.arrival < args.alone],
        "beside the flood": [one for one in quiet if args.alone <= one.arrival < end],
        "after it": [one for one in quiet if one.arrival >= end + _RECOVERY],
    }
    refused = Counter(code for one in flood if (code := refusal_code(one)) is not None)
    return {
        "flood_requests_per_second": rate,
        "quiet": {name: _phase(members) for name, members in phases.items()},
        "flood": {
            "sent": len(flood),
            "answered": sum(one.ok for one in flood),
            "refused": dict(refused),
            "neither": sum(not one.ok and refusal_code(one) is None for one in flood),
        },
        "server_memory_grown_bytes": grown,
        "latest_send": max(one.sent - one.arrival for one in [*quiet, *flood] if one.sent),
    }


def _phase(records: Sequence[Record]) -> dict[str, float]:
    import numpy as np

    ttfts = [one.first_token - one.arrival for one in records if one.first_token is not None]
    p50, p99 = np.percentile(ttfts, [50, 99]) if ttfts else (float("inf"),) * 2
    return {
        "sent": len(records),
        "answered": sum(one.ok for one in records),
        "ttft_p50": float(p50),
        "ttft_p99": float(p99),
    }


def _problems(result: Mapping[str, Any]) -> list[str]:
    quiet, flood = result["quiet"], result["flood"]
    problems = []
    alone, after = quiet["alone"], quiet["after it"]
    if quiet["beside the flood"]["ttft_p99"] > _WORST * alone["ttft_p99"]:
        problems.append(f"p99 TTFT of the quiet tenant: more than {_WORST:g} times that alone")
    if after["ttft_p99"] > _WORST * alone["ttft_p99"]:
        problems.append(f"service is not back to normal {_RECOVERY:g} s after the flood")
    if any(phase["answered"] < phase["sent"] for phase in quiet.values()):
        problems.append("a request of the quiet tenant was not answered")
    if flood["neither"]:
        problems.append(f"{flood['neither']} requests got neither an answer nor a code")
    return problems


def _print(console: Any, result: Mapping[str, Any]) -> None:
    from vllm_semantic_sched.bench.console import make_table

    columns = ("", "sent", "answered", "TTFT p50, s", "TTFT p99, s", "p99 vs alone")
    table = make_table("the quiet tenant", *columns)
    alone = result["quiet"]["alone"]["ttft_p99"]
    for name, phase in result["quiet"].items():
        table.add_row(
            *(name, str(phase["sent"]), str(phase["answered"])),
            *(f"{phase['ttft_p50']:.3f}", f"{phase['ttft_p99']:.3f}"),
            f"{phase['ttft_p99'] / alone:.2f}x",
        )
    console.print(table)
    flood = result["flood"]
    refused = ", ".join(f"{count} {code}" for code, count in flood["refused"].items()) or "none"
    console.print(
        f"flood: {result['flood_requests_per_second']:.0f} requests/s, {flood['sent']} sent, "
        f"{flood['answered']} answered, refused: {refused}; {flood['neither']} neither\n"
        f"server memory grew by {result['server_memory_grown_bytes'] / 2**20:.0f} MiB; latest "
        f"send {result['latest_send']:.2f} s",
        soft_wrap=True,
    )
