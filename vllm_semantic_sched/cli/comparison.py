"""Options, progress, tables and exit status of commands that compare schedulers on real servers."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench.server import ServerConfig
from vllm_semantic_sched.bench.workload import WorkloadConfig, make_workload, parse_mix
from vllm_semantic_sched.cli.console import make_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vllm_semantic_sched.bench.client import Progress
    from vllm_semantic_sched.bench.compare import RunPlan
    from vllm_semantic_sched.bench.metrics import Metric, Summary
    from vllm_semantic_sched.bench.results import MixResult
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec
    from vllm_semantic_sched.bench.targets import Target

_REFERENCE = "fcfs"

# Options


def add_plan_arguments(
    parser: argparse.ArgumentParser, requests: int, max_burst: int, overload: float
) -> None:
    """Declare the options of `make_plan`, with these defaults."""
    load = WorkloadConfig()
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="ems", help="of the semantic schedulers: a name or a YAML file")
    add("--requests", type=int, default=requests, help="per mix (default: %(default)s)")
    add(
        "--overload",
        type=float,
        default=overload,
        help="offered load over the first scheduler's measured capacity (%(default)s)",
    )
    add("--gap", type=float, help="seconds between bursts, instead of --overload")
    add("--maxcon", type=int, default=max_burst, help="largest burst (%(default)s)")
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
        help="run every scheduler this many times, in reversed order every second time, and pool "
        "the records: use 2 or more if the machine's speed drifts (%(default)s)",
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the output folder and the options of `make_server`."""
    shape = ServerConfig(Path(), Path())
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for results, pictures and logs")
    add("--seats", type=int, default=shape.seats, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=shape.num_blocks, help="KV blocks; 0: vLLM's choice")
    add("--block-size", type=int, default=shape.block_size, help="tokens per block (%(default)s)")
    add("--stream-interval", type=int, default=shape.stream_interval, help="tokens per message")
    add_nice_argument(parser)
    add("--server-args", default="", help="more arguments of vllm serve, one quoted string")
    add("--quiet", action="store_true", help="no progress bars")


def add_nice_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --nice."""
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="process priority of servers and client; a value below 0 makes other programs "
        "disturb the figures less and needs root",
    )


def make_server(args: argparse.Namespace) -> ServerConfig:
    """Return the server that the options describe."""
    return ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks or None,
        block_size=args.block_size,
        stream_interval=args.stream_interval,
        nice=args.nice,
        extra_args=tuple(shlex.split(args.server_args)),
    )


def make_plan(
    args: argparse.Namespace, schedulers: Sequence[SchedulerSpec], mixes: Sequence[str]
) -> RunPlan:
    """Return the plan that the options describe.

    Raises:
        ValueError: an option has an impossible value.
        FileNotFoundError: the model folder does not exist.
    """
    from vllm_semantic_sched.bench.compare import RunPlan, end_token

    for mix in mixes:
        parse_mix(mix)
    load = WorkloadConfig(
        requests=args.requests,
        gap=args.gap or 0.0,
        max_burst=args.maxcon,
        seed=args.seed,
        max_output_tokens=args.max_output,
    )
    return RunPlan(
        server=make_server(args),
        schedulers=schedulers,
        workloads=[make_workload(replace(load, mix=mix)) for mix in mixes],
        output=args.output,
        overload=None if args.gap else args.overload,
        eos_token=end_token(args.model),
        rounds=args.rounds,
    )


# Progress and exit status


def show_progress(quiet: bool = False) -> Progress:
    """Return progress messages and bars on the terminal; with `quiet`, none."""
    from tqdm import tqdm

    from vllm_semantic_sched.bench.client import Progress

    class TerminalProgress(Progress):
        def message(self, text: str) -> None:
            print(text, flush=True)

        @contextmanager
        def bar(self, label: str, total: int) -> Iterator[Callable[[], object]]:
            with tqdm(desc=label, total=total, mininterval=1.0) as shown:
                yield shown.update

    return Progress() if quiet else TerminalProgress()


def run_command(
    name: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Run a command and return its exit status: 2 for bad arguments, 1 for a failed run."""
    # Without this, SIGTERM would leave a server behind that the command started.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def print_problems(console: Console, problems: Iterable[str]) -> int:
    """Print why a command fails; returns its exit status, 0 without a problem."""
    status = 0
    for problem in problems:
        console.print(f"[red]{problem}[/]", soft_wrap=True)
        status = 1
    return status


# Tables


def print_mix(console: Console, mix: str, rows: dict[str, MixResult]) -> None:
    """Print the results of one mix of levels: totals and a table per urgency level."""
    first = next(iter(rows.values()))
    console.print()
    rounds = len(first.rounds)
    times = f", {rounds} times" if rounds > 1 else ""
    console.rule(f"mix {mix}: {len(first.workload.requests)} requests{times}")
    console.print(f"answer lengths: {first.workload.length_source}")
    console.print(_totals(rows))
    for level in first.levels:
        console.print(_level_table(level, rows))
    console.print(
        "Each cell is mean, p50, p99. norm. waiting = (finish - arrival) / output tokens; "
        "slowdown = E2E / E2E of the same request on an idle engine (fitted); "
        "gain = FCFS / this row."
    )


def print_targets(console: Console, targets: Iterable[Target]) -> None:
    """Print each target with the measured value."""
    table = make_table("targets", "target", "measured", "required", "")
    for target in targets:
        verdict = "[green]met[/]" if target.met else "[red]missed[/]"
        required = f"at {'most' if target.at_most else 'least'} {target.required:g}"
        table.add_row(target.text, f"{target.measured:.3g}", required, verdict)
    console.print(table)


def _totals(rows: dict[str, MixResult]) -> Table:
    table = make_table(
        "totals", "scheduler", "answered", "output tok/s", "vs FCFS", "overload", "preemptions",
        "outputs differ", "latest send", "CPU used elsewhere",
    )  # fmt: skip
    first = next(iter(rows.values()))
    reference = rows.get(_REFERENCE)
    for row in rows.values():
        ratio = row.tokens_per_second / reference.tokens_per_second if reference else None
        compared = row is not first or len(row.rounds) > 1
        differ = f"{len(row.counted_differences)} ({len(row.differences)} with near ties)"
        speeds = [done.tokens_per_second for done in row.rounds]
        spread = f" ({min(speeds):.0f}-{max(speeds):.0f})" if len(speeds) > 1 else ""
        table.add_row(
            row.scheduler.title,
            f"{row.requests - len(row.failed)}/{row.requests}",
            f"{row.tokens_per_second:.0f}{spread}",
            "-" if ratio is None else f"{ratio:.3f}",
            f"{row.overload:.1f}x",
            f"{row.counters.get('vllm:num_preemptions_total', 0):.0f}",
            differ if compared else "-",
            f"{row.latest_send:.2f} s",
            f"{row.elsewhere:.0%}",
        )
    return table


def _level_table(level: str, rows: dict[str, MixResult]) -> Table:
    from vllm_semantic_sched.bench.metrics import METRICS

    title = "all levels" if level == "all" else f"urgency {level}"
    if level == "0":
        title += " (most urgent)"
    count = next(iter(rows.values())).levels[level][METRICS[0].key].count
    columns = ["scheduler", *(f"{metric.title},\n{metric.unit}" for metric in METRICS)]
    gain_columns = ("norm.w.\ngain", "p99 TTFT\ngain")
    table = make_table(f"{title}, {count} requests", *columns, *gain_columns)
    for column in table.columns[: len(columns)]:
        column.no_wrap = True
    reference = rows.get(_REFERENCE)
    for row in rows.values():
        summaries = row.levels.get(level)
        if summaries is None:
            table.add_row(row.scheduler.title, *["-"] * (len(METRICS) + 2))
            continue
        cells = [_cell(summaries[metric.key], metric) for metric in METRICS]
        gains = ["-", "-"]
        if reference is not None and level in reference.levels:
            base = reference.levels[level]
            gains = [
                f"{base['normalized_waiting'].mean / summaries['normalized_waiting'].mean:.2f}x",
                f"{base['ttft'].p99 / summaries['ttft'].p99:.2f}x",
            ]
        table.add_row(row.scheduler.title, *cells, *gains)
    return table


def _cell(summary: Summary, metric: Metric) -> str:
    values = (summary.mean, summary.p50, summary.p99)
    return " ".join(_three_digits(value * metric.scale) for value in values)


def _three_digits(value: float) -> str:
    """About three digits and five characters, so that columns line up."""
    for limit, digits in ((10, 3), (100, 2), (1000, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
