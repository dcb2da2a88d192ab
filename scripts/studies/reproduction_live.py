"""The paper's bursts on a real engine (figures 2c, 2d and 3), under FCFS, SJF, HPJF and semantic.

For each gap and each largest burst the same requests go to one server per scheduler. Prints how
much longer level 0 waits per token than under semantic scheduling, and writes
`reproduction_live.json`. An interrupted run goes on with the next scheduler.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import main, serve, write_json
from reproduction import PRINTED

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments, print_problems
from vllm_semantic_sched.lab.bench.metrics import finish_order_violations, latest_send, throughput
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import BenchRequest, WorkloadConfig, make_workload
from vllm_semantic_sched.lab.report.tables import make_table

SCHEDULERS = {
    "FCFS": SchedulerSpec("FCFS", "fcfs"),
    "SJF": SchedulerSpec("SJF", "semantic", "sjf"),
    "HPJF": SchedulerSpec("HPJF", "semantic-true", "priority"),  # it is told the urgency
    "semantic": SchedulerSpec("semantic", "semantic", "ems"),
}
_WARM_UP = 24
Figures = dict[str, float | None]


def requests_of(args: argparse.Namespace, gap: float, burst: int) -> Sequence[BenchRequest]:
    """The requests of one cell: `args.bursts` bursts of up to `burst`, `gap` seconds apart."""
    config = WorkloadConfig(
        requests=max(1, args.bursts * burst // 2),
        gap=gap,
        max_burst=burst,
        seed=args.seed,
        max_output_tokens=args.max_output,
    )
    return make_workload(config).requests


def figures_of(records: Sequence[Record]) -> Figures:
    """Seconds per token (sum of waiting / sum of tokens) of level 0 and of all, and more."""
    urgent = [record for record in records if record.level == 0]
    return {
        "0": _per_token(urgent),
        "all": _per_token(records),
        "tokens_per_second": throughput(records),
        "finish_order_violations": finish_order_violations(records),
        "latest_send": latest_send(records),
        "failed": sum(not record.ok for record in records),
    }


def _per_token(records: Sequence[Record]) -> float | None:
    done = [record for record in records if record.ok and record.finish is not None]
    tokens = sum(record.output_tokens for record in done)
    return sum(record.finish - record.arrival for record in done) / tokens if tokens else None


def measure(args: argparse.Namespace, name: str) -> dict[str, Figures]:
    """Figures of one scheduler by cell, `gap/burst`."""
    spec = SCHEDULERS[name]
    figures = {}
    with serve(args, spec, args.max_output) as (server, client):
        client.send_together(requests_of(args, 0.0, _WARM_UP))
        for gap in map(float, args.gaps.split(",")):
            for burst in map(int, args.bursts_of.split(",")):
                records = client.send(requests_of(args, gap, burst), f"{name} {gap:g}/{burst}")
                server.check()
                figures[f"{gap:g}/{burst}"] = figures_of(records)
    return figures


def results_so_far(path: Path, args: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """The schedulers that an interrupted run with the same options has measured."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text("utf-8"))
    same = document["options"] == json.loads(json.dumps(vars(args), default=str))
    return document["cells"] if same else {}


def rows_of(results: Mapping[str, Mapping[str, Figures]]) -> list[list[str]]:
    """A row per cell: level 0 of each scheduler over `semantic`'s, and seconds per token."""
    rows = []
    for cell, semantic in results["semantic"].items():
        others = [results[name][cell] for name in ("HPJF", "SJF", "FCFS")]
        own = semantic["0"]
        ratios = [
            f"{figures['0'] / own:.1f}" if own and figures["0"] else "-" for figures in others
        ]
        means = [f"{1e3 * (figures['all'] or 0):.0f}" for figures in (*reversed(others), semantic)]
        violations = f"{100 * (semantic['finish_order_violations'] or 0):.0f} %"
        rows.append([cell, *ratios, f"{1e3 * (own or 0):.0f}", " / ".join(means), violations])
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    add = parser.add_argument
    add("--gaps", default="0.1,1.0", help="seconds between bursts (%(default)s)")
    add("--bursts-of", default="5,20,50,100", help="largest bursts (%(default)s)")
    add("--bursts", type=int, default=10, help="bursts in each cell (default: %(default)s)")
    add("--max-output", type=int, default=96, help="longer answers are cut (%(default)s)")
    add("--seed", type=int, default=0, help="of the workload (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure every scheduler and print the table; 1 if a request failed."""
    path = args.output / "reproduction_live.json"
    results = results_so_far(path, args)
    for name in SCHEDULERS:
        if name not in results:
            results[name] = measure(args, name)
            document = {"environment": environment(), "options": vars(args), "cells": results}
            write_json(path, document)
    console = make_console()
    table = make_table(
        "level 0, times semantic",
        "gap / burst", "HPJF", "SJF", "FCFS", "semantic,\nms per token",
        "all levels, ms per token:\nFCFS / SJF / HPJF / semantic", "finish order:\nsemantic",
    )  # fmt: skip
    for row in rows_of(results):
        table.add_row(*row)
    console.print(table)
    figures = PRINTED["figure_2c"]
    printed = ", ".join(f"{name} {figures[name]}" for name in ("HPJF", "SJF", "FCFS"))
    console.print(f"printed at 0.1/100, simulated: {printed}; records: {path}", soft_wrap=True)
    failed = sum(figures["failed"] or 0 for cells in results.values() for figures in cells.values())
    problems = [f"{failed:.0f} requests failed"] if failed else []
    return print_problems(console, problems)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
