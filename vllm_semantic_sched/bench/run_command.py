"""`semsched bench run`: compare schedulers under the same load on a real `vllm serve`."""

from __future__ import annotations

import argparse

from vllm_semantic_sched.bench.load import WorkloadConfig
from vllm_semantic_sched.bench.options import add_plan_arguments, make_plan

_SCHEDULERS = "fcfs,priority,semantic,semantic-true"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench run`."""
    load = WorkloadConfig()
    add_plan_arguments(parser, load.requests, load.max_burst, overload=8.0)
    add = parser.add_argument
    add("--schedulers", default=_SCHEDULERS, help="comma-separated (default: %(default)s)")
    add("--profile", help="engine profile of the semantic schedulers, by name or path")
    add(
        "--host-gib",
        type=float,
        default=0.0,
        metavar="G",
        help="host memory in which the semantic schedulers keep KV of preempted requests "
        "(docs/preemption.md); 0: it is computed again (default: %(default)s)",
    )
    add("--mix", default="even,rare", help="names or five weights like 1:2:3:2:2, comma-separated")
    add(
        "--check-outputs",
        action="store_true",
        help="fail if a greedy output departs from the first scheduler's",
    )
    add("--assert-targets", action="store_true", help="fail if a required ratio is missed")


def run(args: argparse.Namespace) -> int:
    """Run the comparison; 1 if a request failed, an output differs or a target is missed."""
    from vllm_semantic_sched.bench import report
    from vllm_semantic_sched.bench.compare import compare
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.schedulers import parse_schedulers
    from vllm_semantic_sched.bench.targets import check_targets, missed

    schedulers = parse_schedulers(args.schedulers, args.policy, args.profile, args.host_gib)
    plan = make_plan(args, schedulers, [mix.strip() for mix in args.mix.split(",")])
    console = make_console()
    comparison = compare(plan, vars(args), not args.quiet)
    for mix, rows in comparison.mixes.items():
        report.print_mix(console, mix, rows)
    picture = plan.output / "comparison.png"
    report.draw(comparison, picture)
    targets = check_targets(comparison.mixes)
    report.print_targets(console, targets)
    console.print(f"records: {plan.output / 'results.json'}\npicture: {picture}", soft_wrap=True)

    problems = comparison.failures()
    if args.check_outputs:
        count = sum(len(row.counted_differences) for row in comparison.rows())
        console.print(f"greedy outputs that differ: {count}")
        problems += [f"{count} greedy outputs differ"] if count else []
    if args.assert_targets:
        problems += missed(targets)
    return report.print_problems(console, problems)
