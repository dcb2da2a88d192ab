"""Fair shares on a real server: do they converge under contention, and does only pressure refuse?

Three tiers offer the same load, together more than the server can do, under the policy `shares`,
with its refusals over share and without. Before that, background sends one request after the other.
Prints the tiers' shares of the output tokens over time and the refusals, and writes `shares.json`.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from common import capacity, main, refusal_code, serve, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments, print_problems
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import BenchRequest, WorkloadConfig, make_workload
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.files import read_config

VARIANTS = {"shares": None, "nothing refused": "off"}  # admission.over_share
_MIX = "1:1:1:0:0"
_CALM = 20
_BACKGROUND = 2


def write_policy(folder: Path, name: str) -> Path:
    """The policy `shares`, as shipped or without refusals over share."""
    keys = read_config("shares", kind="policy")[0]
    if VARIANTS[name] is not None:
        keys["admission"] = {"over_share": VARIANTS[name]}
    path = folder / f"policy-{name.replace(' ', '-')}.yaml"
    path.write_text(yaml.safe_dump(keys, sort_keys=False))
    return path


def requests_of(args: argparse.Namespace, count: int, gap: float) -> Sequence[BenchRequest]:
    """Requests of all three tiers in equal parts, in bursts of up to four."""
    config = WorkloadConfig(
        requests=count, mix=_MIX, gap=gap, max_burst=4, seed=args.seed, max_output_tokens=64
    )
    return make_workload(config).requests


def shares_over_time(records: Sequence[Record], seconds: float, window: float) -> list[list[float]]:
    """Each tier's share of the output tokens of answers that finished in each window."""
    rows = []
    for number in range(int(seconds / window)):
        tokens = [0, 0, 0]
        for record in records:
            if record.ok and record.finish is not None and int(record.finish / window) == number:
                tokens[record.level] += record.output_tokens
        rows.append([count / max(1, sum(tokens)) for count in tokens])
    return rows


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The figures of one variant."""
    spec = SchedulerSpec(name, "semantic-true", str(write_policy(args.output, name)))
    with serve(args, spec, 64) as (server, client):
        rate = capacity(client, requests_of(args, 8 * args.seats, 0.0))
        calm = [replace(request, level=_BACKGROUND) for request in requests_of(args, _CALM, 0.0)]
        alone = client.send_one_by_one(calm, "calm")
        gap = 2 / (args.overload * rate)
        count = int(args.seconds * args.overload * rate)
        records = client.send(requests_of(args, count, gap), name, stop_after=args.seconds)
        server.check()
    refused: Counter[tuple[int, str]] = Counter()
    for record in records:
        code = refusal_code(record)
        if code is not None:
            refused[record.level, code] += 1
    return {
        "capacity_requests_per_second": rate,
        "calm_refused": sum(refusal_code(record) is not None for record in alone),
        "calm_answered": sum(record.ok for record in alone),
        "sent": [sum(record.level == level for record in records) for level in range(3)],
        "refused": [[level, code, number] for (level, code), number in sorted(refused.items())],
        "shares": shares_over_time(records, args.seconds, args.window),
    }


def problems_of(results: dict[str, Any]) -> list[str]:
    """A line for each thing that should not be."""
    problems = []
    for name, figures in results.items():
        if figures["calm_refused"]:
            problems.append(f"{name}: {figures['calm_refused']} requests refused without pressure")
        if any(level == 0 for level, *_ in figures["refused"]):
            problems.append(f"{name}: premium was refused")
    return problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="of contention (default: %(default)s)")
    add("--window", type=float, default=10.0, help="seconds of a share (default: %(default)s)")
    add("--overload", type=float, default=3.0, help="offered load over capacity (%(default)s)")
    add("--seed", type=int, default=0, help="of the workload (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure both variants and print the tables; 1 if something should not be."""
    results = {name: measure(args, name) for name in VARIANTS}
    write_json(args.output / "shares.json", {"environment": environment(), **results})
    targets = parse_policy(read_config("shares", kind="policy")[0]).target_shares
    table = make_table(
        "share of the output tokens, %", "policy", "seconds", "premium", "standard", "background"
    )
    table.add_row("target", "", *(f"{100 * target:.0f}" for target in targets))
    for name, figures in results.items():
        for number, shares in enumerate(figures["shares"]):
            begin = number * args.window
            cells = (f"{100 * share:.0f}" for share in shares)
            table.add_row(name, f"{begin:.0f} to {begin + args.window:.0f}", *cells)
    console = make_console()
    console.print(table)
    for name, figures in results.items():
        refused = ", ".join(f"tier {level}: {n} {code}" for level, code, n in figures["refused"])
        console.print(
            f"{name}: {figures['calm_answered']} of {_CALM} background requests answered without "
            f"pressure; of {figures['sent']} sent under pressure refused: {refused or 'none'}"
        )
    return print_problems(console, problems_of(results))


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
