"""A canary on a real server with one engine and with two: how soon is a policy rolled back that
misses an SLO, and is a good one left alone and kept?

Premium, standard and background requests arrive at more than the server's capacity. The good policy
protects premium a little less. Under the bad one, none preempts another, and one seat in ten goes
to the oldest request that has waited for seconds. Prints what happened to each, and writes
`canary.json`.
"""

import argparse
import threading
import time
from dataclasses import replace
from typing import Any

import yaml
from common import capacity, main, serve, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments, print_problems
from vllm_semantic_sched.lab.bench.engines import parallel_args
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import WorkloadConfig, make_workload
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.operate.client import AdminClient
from vllm_semantic_sched.policy.config.files import read_config

CANDIDATES: dict[str, dict[str, Any]] = {
    "good": {"protect": {"level": 0, "price": 0.02}},
    "bad": {
        "aging": {"enabled": True, "interval": 0.5},
        "preemption": {"enabled": False},
    },
}
"""What the new policies change in the current one."""

_MIX = "2:4:4:0:0"


def current_policy(seconds: float) -> dict[str, Any]:
    """The policy `tiers` with one SLO, so many seconds to premium's first token, and no other
    bound."""
    keys = read_config("tiers", kind="policy")[0]
    keys["tiers"] = [{"name": tier["name"]} for tier in keys["tiers"]]
    keys["tiers"][0]["slo"] = {"ttft": seconds, "percentile": 95.0, "takes_seats": True}
    return keys


def try_policy(
    args: argparse.Namespace, client: AdminClient, policy: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Start a canary and follow it. Keep its policy if it still runs after so many seconds."""
    plan = {"share": args.share, "period": args.period, "lease": 3600.0, "watch": ["ttft"]}
    begin = time.monotonic()
    client.post("/canary/start", policy=policy, **plan)
    while True:
        time.sleep(0.25)
        engines = [engine for engine in client.call("/canary")["engines"] if engine]
        elapsed = time.monotonic() - begin
        ended = [engine for engine in engines if not engine["running"]]
        if ended or elapsed > seconds:
            break
    if not ended:
        engines = [engine for engine in client.post("/canary/stop", keep=True)["engines"] if engine]
    new = [engine["tallies"]["new"][0]["ttft"] for engine in engines]
    return {
        "seconds": elapsed,
        "end": sorted({engine["end"] for engine in engines if engine["end"]}),
        "premium": sum(count for count, *_ in new),
        "met_slo": sum(met for _, met, *_ in new),
    }


def measure(args: argparse.Namespace, engines: int) -> dict[str, Any]:
    """The outcome of both candidates on a server with so many engines."""
    policy = current_policy(args.slo)
    file = args.output / f"policy-{engines}.yaml"
    file.write_text(yaml.safe_dump(policy, sort_keys=False))
    parallel = parallel_args(engines) if engines > 1 else ()
    spec = SchedulerSpec(f"{engines} engines", "semantic-true", str(file), parallel)
    config = WorkloadConfig(requests=8 * args.seats, mix=_MIX, max_output_tokens=200)
    with serve(args, spec, config.max_output_tokens) as (server, client):
        rate = capacity(client, make_workload(config).requests)
        offered = args.overload * rate
        stop = 2 * args.seconds + 30
        load = replace(config, requests=int(stop * offered), gap=2 / offered, max_burst=4)
        requests = make_workload(load).requests
        sender = threading.Thread(target=client.send, args=(requests, spec.name, stop))
        sender.start()
        time.sleep(args.period)
        admin = AdminClient(server.url)
        outcomes = {
            name: try_policy(args, admin, policy | changes, args.seconds)
            for name, changes in CANDIDATES.items()
        }
        server.check()
        sender.join()
    return {"requests_per_second": rate, **outcomes}


def problems_of(results: dict[str, Any]) -> list[str]:
    """A line for each thing that should not be."""
    problems = []
    for engines, outcomes in results.items():
        ends = {name: "; ".join(outcomes[name]["end"]) for name in CANDIDATES}
        if "rolled back" not in ends["bad"]:
            problems.append(f"{engines}: the bad policy was not rolled back")
        if "rolled back" in ends["good"]:
            problems.append(f"{engines}: the good policy was rolled back")
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of each candidate (default: %(default)s)")
    add("--period", type=float, default=10.0, help="of one turn of each policy (%(default)s)")
    add("--share", type=float, default=0.5, help="of the traffic (default: %(default)s)")
    add("--overload", type=float, default=1.3, help="offered load over capacity (%(default)s)")
    add("--slo", type=float, default=2.0, help="premium's time to first token (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure both kinds of server and print the table; 1 if something should not be."""
    results = {str(engines): measure(args, engines) for engines in (1, 2)}
    write_json(args.output / "canary.json", {"environment": environment(), **results})
    columns = ("engines", "policy", "end", "after s", "premium answered", "in time")
    table = make_table("canaries", *columns, words=3)
    for engines, outcomes in results.items():
        for name in CANDIDATES:
            row = outcomes[name]
            figures = (f"{row['seconds']:.1f}", str(row["premium"]), str(row["met_slo"]))
            table.add_row(engines, name, "; ".join(row["end"]), *figures)
    console = make_console()
    console.print(table)
    return print_problems(console, problems_of(results))


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
