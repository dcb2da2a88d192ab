"""Simulate schedulers on a model of an engine: the same policy code as in vLLM, without a GPU."""

import argparse
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from tqdm import tqdm

from vllm_semantic_sched.cli import arguments
from vllm_semantic_sched.cli.console import describe_keys, make_console, save_page
from vllm_semantic_sched.lab.report import runs
from vllm_semantic_sched.lab.report.content import level_title, number_text
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell, cells_of, mapped, run_task, tasks_of
from vllm_semantic_sched.sim.scenario import Scenario, load_scenarios
from vllm_semantic_sched.sim.sections import Settings

_ALWAYS_SHOWN = (
    "ttft_p99", "normalized_waiting", "tokens_per_second", "preemptions_per_minute",
    "slo_met", "refused", "finish_order_violations",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the scenario, its changes, the metric shown and the folder for the results."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "semsched simulate --scenario FILE|NAME --output DIR [options]\n"
        "       semsched simulate --keys"
    )
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
        default="normalized_waiting",
        help="metric of the table and the picture (default: %(default)s); the files have all",
    )
    add("--keys", action="store_true", help="explain every key of a scenario file and exit")
    arguments.add_scenario_arguments(parser)


@arguments.simulating()
def run(args: argparse.Namespace) -> None:
    """Run a scenario; 1 if a file cannot be written, 2 if the scenario or an option is invalid."""
    if args.keys:
        return print(describe_keys(Settings), end="")
    scenarios = _scenarios(args)
    settings = scenarios[0].settings
    args.output.mkdir(parents=True, exist_ok=True)  # fails before the work, not after
    tasks = tasks_of(scenarios)
    results = mapped(run_task, tasks, args.workers)
    bar = tqdm(results, total=len(tasks), unit="run", disable=args.quiet)
    cells = cells_of(tasks, list(bar))
    console = make_console()
    if settings.description:
        console.print(settings.description, soft_wrap=True)
    levels = {level_title(level): (level, args.metric) for level in runs.level_names(cells)}
    console.print(_table(cells, f"{args.metric}: {METRICS[args.metric]}", levels))
    totals = {name.replace("_", "\n"): (ALL, name) for name in _ALWAYS_SHOWN if name != args.metric}
    console.print(_table(cells, "all levels", totals))
    written = runs.write_results(args.output, settings, cells)
    policies = scenarios[0].policies.items()
    reference = next((name for name, policy in policies if policy.base == "fcfs"), None)
    page = runs.simulation_page(settings, cells, args.metric, reference)
    written += save_page(page, args.output)
    console.print("written: " + " ".join(map(str, written)), soft_wrap=True)


def _scenarios(args: argparse.Namespace) -> Sequence[Scenario]:
    if args.scenario is None or args.output is None:
        raise arguments.Failure("needs --scenario and --output, or --keys", 2)
    if args.metric not in METRICS:
        raise arguments.Failure(f"--metric {args.metric}: unknown; valid: {', '.join(METRICS)}", 2)
    scenarios = load_scenarios(args.scenario, arguments.parse_changes(args.set))
    if args.metric == "slo_met" and not any(map(_has_slo, scenarios)):
        raise arguments.Failure("--metric slo_met: neither the scenario nor a policy has an SLO", 2)
    return scenarios


def _has_slo(scenario: Scenario) -> bool:
    """Whether a request may have an SLO, of its level or its own."""
    workload = scenario.settings.workload
    if workload.deadlines or workload.arrivals == "jsonl":
        return True
    slos = [slo for scheduler in scenario.policies for slo in scenario.slos(scheduler)]
    return any(map(targets, slos))


def _table(cells: Sequence[Cell], title: str, columns: Mapping[str, tuple[str, str]]) -> Table:
    """A row per cell, a section per point; `columns` has the level and metric of each column."""
    heads = [*(field.replace(".", ".\n") for field in cells[0].point), "scheduler"]
    table = make_table(title, *heads, *columns, words=len(heads))
    for column in table.columns[: len(heads)]:
        column.no_wrap = True
    for point, schedulers in itertools.groupby(cells, runs.point_texts):
        for cell in schedulers:
            figures = (
                number_text(*runs.metric_values([cell], *level_and_metric))
                for level_and_metric in columns.values()
            )
            table.add_row(*point, cell.scheduler, *figures)
            point = [""] * len(point)  # shown once
        table.add_section()
    return table
