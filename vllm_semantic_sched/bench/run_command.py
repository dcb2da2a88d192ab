"""`semsched bench run`: compare schedulers under the same load on a real `vllm serve`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench.load import WorkloadConfig, parse_mix
from vllm_semantic_sched.bench.server import ServerConfig

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.compare import RunPlan


_SCHEDULERS = "fcfs,priority,semantic,semantic-true"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench run`."""
    load, shape = WorkloadConfig(), ServerConfig(Path(), Path())
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for results.json, the PNG and logs")
    add("--schedulers", default=_SCHEDULERS, help="comma-separated (default: %(default)s)")
    add("--policy", default="ems", help="of the semantic schedulers: a name or a YAML file")
    add("--mix", default="even,rare", help="names or five weights like 1:2:3:2:2, comma-separated")
    add("--requests", type=int, default=load.requests, help="per mix (default: %(default)s)")
    add(
        "--overload",
        type=float,
        default=8.0,
        help="offered load over the first scheduler's measured capacity (%(default)s)",
    )
    add("--gap", type=float, help="seconds between bursts, instead of --overload")
    add("--maxcon", type=int, default=load.max_burst, help="largest burst (%(default)s)")
    add("--seed", type=int, default=load.seed, help="of the workload (%(default)s)")
    add(
        "--max-output",
        type=int,
        default=load.max_output_tokens,
        help="longer answers are cut to this many tokens (%(default)s)",
    )
    add(
        "--rounds",
        type=int,
        default=1,
        help="run every scheduler so many times, in reversed order every second time, and pool "
        "the records: use 2 or more where the machine's speed drifts (%(default)s)",
    )
    add("--seats", type=int, default=shape.seats, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=shape.num_blocks, help="KV blocks; 0: vLLM's choice")
    add("--block-size", type=int, default=shape.block_size, help="tokens a block (%(default)s)")
    add("--stream-interval", type=int, default=shape.stream_interval, help="tokens per message")
    add(
        "--nice",
        type=int,
        default=0,
        help="process priority of servers and client; below 0, for figures that other programs "
        "disturb less, needs root",
    )
    add("--server-args", default="", help="more arguments of vllm serve, one quoted string")
    add(
        "--check-outputs",
        action="store_true",
        help="fail if a greedy output departs from the first scheduler's",
    )
    add("--assert-targets", action="store_true", help="fail if a required ratio is missed")
    add("--quiet", action="store_true", help="no progress bars")


def run(args: argparse.Namespace) -> int:
    """Run the comparison; 1 if a request failed, an output differs or a target is missed."""
    from vllm_semantic_sched.bench import report
    from vllm_semantic_sched.bench.compare import compare
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.targets import check_targets

    plan = _plan(args)
    console = make_console()
    comparison = compare(plan, vars(args), not args.quiet)
    for mix, rows in comparison.mixes.items():
        report.print_mix(console, mix, rows)
    picture = plan.output / "comparison.png"
    report.draw(comparison, picture)
    targets = check_targets(comparison.mixes)
    report.print_targets(console, targets)
    console.print(f"records: {plan.output / 'results.json'}\npicture: {picture}", soft_wrap=True)

    results = [row for rows in comparison.mixes.values() for row in rows.values()]
    problems = [
        f"{row.scheduler.name}, mix {row.workload.config.mix}: {len(row.failed)} requests failed, "
        f"the first with: {row.failed[0].error or 'another output length than wanted'}"
        for row in results
        if row.failed
    ]
    if args.check_outputs:
        count = sum(len(row.counted_differences) for row in results)
        console.print(f"greedy outputs that differ: {count}")
        problems += [f"{count} greedy outputs differ"] if count else []
    if args.assert_targets:
        problems += [f"target missed: {target.text}" for target in targets if not target.met]
    for problem in problems:
        console.print(f"[red]{problem}[/]", soft_wrap=True)
    return 1 if problems else 0


def _plan(args: argparse.Namespace) -> RunPlan:
    from vllm_semantic_sched.bench.compare import RunPlan, end_token
    from vllm_semantic_sched.bench.schedulers import parse_schedulers
    from vllm_semantic_sched.bench.workload import make_workload

    mixes = [mix.strip() for mix in args.mix.split(",")]
    for mix in mixes:
        parse_mix(mix)
    load = WorkloadConfig(
        requests=args.requests,
        gap=args.gap or 0.0,
        max_burst=args.maxcon,
        seed=args.seed,
        max_output_tokens=args.max_output,
    )
    server = ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks or None,
        block_size=args.block_size,
        stream_interval=args.stream_interval,
        nice=args.nice,
        extra_args=tuple(shlex.split(args.server_args)),
    )
    return RunPlan(
        server=server,
        schedulers=parse_schedulers(args.schedulers, args.policy),
        workloads=[make_workload(replace(load, mix=mix)) for mix in mixes],
        output=args.output,
        overload=None if args.gap else args.overload,
        eos_token=end_token(args.model),
        rounds=args.rounds,
    )
