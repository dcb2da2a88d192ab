"""Simulate schedulers on a model of an engine: the same policy code as in vLLM, without a GPU."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.cli.arguments import (
    BadOption,
    add_scenario_arguments,
    parse_changes,
    run_simulation,
)
from vllm_semantic_sched.cli.console import describe_keys, make_console, make_table
from vllm_semantic_sched.policy.facts.files import shipped_names

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_semantic_sched.sim.runner import Cell

_MOST_CHARTS = 12  # Gantt charts and queue depths per call
_DEFAULT_METRIC = "normalized_waiting"
_ALWAYS_SHOWN = (
    "ttft_p99", "normalized_waiting", "tokens_per_second", "preemptions_per_minute",
    "slo_met", "refused", "passed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        textwrap.fill(f"shipped scenarios: {', '.join(shipped_names('scenario'))}", 96)
        + "\n\nexamples:\n  semsched simulate --scenario paper-table1 --output results --workers 2"
        "\n  semsched simulate --keys      (every key of a scenario file and its meaning)"
    )
    add = parser.add_argument
    add("--scenario", metavar="FILE|NAME", help="a scenario file, or the name of a shipped one")
    add("--output", type=Path, metavar="DIR", help="folder for results and pictures")
    add(
        "--metric",
        default=_DEFAULT_METRIC,
        help="metric of the table and the picture (default: %(default)s); the files have all",
    )
    add("--keys", action="store_true", help="explain every key of a scenario file and exit")
    add_scenario_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run a scenario.

    Returns:
        0; 1 if a file cannot be written, 2 if the scenario or an option is invalid.
    """
    if args.keys:
        from vllm_semantic_sched.sim.sections import Settings

        print(describe_keys(Settings), end="")
        return 0
    return run_simulation("simulate", _run, args)


def _run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from vllm_semantic_sched.sim.metrics import METRICS, is_promised
    from vllm_semantic_sched.sim.report import (
        draw_depths,
        draw_metric,
        title_of,
        write_results,
        write_trace,
    )
    from vllm_semantic_sched.sim.runner import cells_of, mapped, run_task, tasks_of
    from vllm_semantic_sched.sim.scenario import load_scenarios
    from vllm_semantic_sched.sim.spans import draw_gantt

    if args.scenario is None or args.output is None:
        raise BadOption("needs --scenario and --output")
    if args.metric not in METRICS:
        raise BadOption(f"--metric {args.metric}: unknown; valid: {', '.join(METRICS)}")
    scenarios = load_scenarios(args.scenario, parse_changes(args.set))
    settings = scenarios[0].settings
    if args.metric == "slo_met" and not any(
        is_promised(slo)
        for scenario in scenarios
        for scheduler in scenario.policies
        for slo in scenario.slos(scheduler)
    ):
        raise BadOption("--metric slo_met: neither the scenario nor a policy has an SLO")
    args.output.mkdir(parents=True, exist_ok=True)  # fails before the work, not after
    tasks = tasks_of(scenarios)
    with mapped(run_task, tasks, args.workers) as stream:
        bar = tqdm(stream, total=len(tasks), unit="run", disable=args.quiet)
        cells = cells_of(tasks, list(bar))
    console = make_console()
    if settings.description:
        console.print(settings.description, soft_wrap=True)
    console.print(_table(cells, args.metric))
    picture, depths = args.output / f"{args.metric}.png", args.output / "queue-depth.png"
    written = [*write_results(args.output, settings, cells), picture, depths]
    draw_metric(cells, args.metric, picture, list(settings.sweep[0]) if settings.sweep else [])
    draw_depths(cells[:_MOST_CHARTS], depths)
    for number, cell in enumerate([cell for cell in cells if cell.spans][:_MOST_CHARTS]):
        name = f"{number}-{cell.scheduler}"
        written += [args.output / f"gantt-{name}.png", args.output / f"trace-{name}.json"]
        draw_gantt(cell.spans, written[-2], title_of(cell))
        write_trace(written[-1], cell)
    console.print("written: " + " ".join(map(str, written)), soft_wrap=True)
    return 0


def _table(cells: Sequence[Cell], metric: str) -> Table:
    """One metric: a row per cell, a column per level."""
    from vllm_semantic_sched.sim.metrics import ALL, METRICS
    from vllm_semantic_sched.sim.report import level_names, number_text, point_texts

    levels, fields = level_names(cells), list(cells[0].point)
    more = [name for name in _ALWAYS_SHOWN if name != metric]
    table = make_table(
        f"{metric}: {METRICS[metric]}",
        *fields,
        "scheduler",
        *(level if level == ALL else f"urgency {level}" for level in levels),
        *(name.replace("_", "\n") + ",\nall" for name in more),
        words=len(fields) + 1,
    )
    for column in table.columns[: len(fields) + 1]:
        column.no_wrap = True
    previous: list[str] | None = None
    for cell in cells:
        point = point_texts(cell)
        if previous is not None and point != previous:
            table.add_section()
        values: list[Any] = [
            *(cell.levels.get(level, {}).get(metric, math.nan) for level in levels),
            *(cell.levels[ALL].get(name, math.nan) for name in more),
        ]
        table.add_row(
            *(point if point != previous else [""] * len(fields)),
            cell.scheduler,
            *map(number_text, values),
        )
        previous = point
    return table
