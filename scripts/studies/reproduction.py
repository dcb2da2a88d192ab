"""Simulate the paper's figures and tables and a published table of mixed load.

Prints one Markdown table for each, with our numbers beside the printed ones. Needs no engine.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from common import main

from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.sim.runner import Cell, cells_of, mapped, run_task, tasks_of
from vllm_semantic_sched.sim.scenario import load_scenarios

PRINTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text())
"""Numbers as the paper prints them; `paper.yaml` explains each."""

_METRIC = "waiting_per_token"
_LEVELS = ("0", "1", "2", "3", "4", "all")
_MODES = ("full_batching", "immediate")
_OTHERS = ("HPJF", "SJF", "FCFS")
_SCENARIOS = (
    "paper-table1",
    "paper-table1-script",
    "paper-table2",
    "paper-table2-script",
    "paper-fig2a",
    "paper-fig2b",
    "paper-fig2c",
    "paper-fig2d",
    "paper-fig3",
    "paper-fig4",
    "paper-fig5",
    "tiers",
)

# The field that a table's columns vary, and its printed numbers.
_TABLES = {
    "paper-table1": ("predictor.latency", "table_1"),
    "paper-table2": ("predictor.max_batch", "table_2"),
}

Results = dict[str, list[Cell]]


def run_scenarios(
    workers: int, progress: Progress | None = None, names: Sequence[str] = _SCENARIOS
) -> Results:
    """Simulate scenarios of the paper, by default all, in `workers` processes; returns their cells
    by name."""
    tasks = {name: tasks_of(load_scenarios(name)) for name in names}
    flat = [task for group in tasks.values() for task in group]
    bar = (progress or Progress()).bar("simulating", len(flat))
    outcomes = []
    with bar as advance:
        for outcome in mapped(run_task, flat, workers):
            outcomes.append(outcome)
            advance()
    results = {}
    place = 0
    for name, group in tasks.items():
        results[name] = cells_of(group, outcomes[place : place + len(group)])
        place += len(group)
    return results


def report(results: Results) -> Iterator[str]:
    """Yield lines of Markdown: a heading and a table for each figure and table of the paper."""
    for name in ("paper-table1-script", "paper-table1", "paper-table2-script", "paper-table2"):
        yield from big_table(name, results[name])
    yield from _error_rates("paper-fig2a", results["paper-fig2a"], PRINTED["figure_2a"])
    yield from _error_rates("paper-fig2b", results["paper-fig2b"], PRINTED["figure_2b"])
    yield from _spikes(results)
    yield from _spikes_on_other_cards(results["paper-fig4"])
    yield from _real_engine([*results["paper-fig3"], *results["paper-fig5"]])
    yield from _mixed_load(results["tiers"])


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"### {title}", "", f"| {' | '.join(header)} |")
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _beside(ours: float, theirs: float | None) -> str:
    printed = "-" if theirs is None else f"{theirs:.2f}"
    return f"{ours:.2f} / {printed}"


def big_table(name: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Lines of one of the paper's two tables, by the name of its scenario."""
    axis, table = _TABLES[name.removesuffix("-script")]
    numbers: Sequence[Sequence[float]] = PRINTED[table]
    by_mode = {
        mode: [cell for cell in cells if cell.point["predictor.mode"] == mode] for mode in _MODES
    }
    ordered = [cell for mode in _MODES for cell in by_mode[mode]]
    header = [""] + [
        f"{mode.split('_')[0]}, {cell.point[axis]}" for mode in _MODES for cell in by_mode[mode]
    ]
    rows = []
    near = 0
    for level, theirs in zip(_LEVELS, numbers, strict=True):
        ours = [cell.levels[level][_METRIC] for cell in ordered]
        if level != "all":
            near += sum(abs(a - b) <= 0.35 * b for a, b in zip(ours, theirs, strict=True))
        label = level if level == "all" else f"level {level}"
        rows.append([label, *(_beside(a, b) for a, b in zip(ours, theirs, strict=True))])
    yield from _table(f"`{name}`: ours / printed, s per token", header, rows)
    yield from (f"{near} of {5 * len(ordered)} cells of levels 0 to 4 are within 35 %.", "")


def _error_rates(
    name: str, cells: Sequence[Cell], numbers: dict[str, Sequence[float]]
) -> Iterator[str]:
    field = next(iter(cells[0].point))
    rows = []
    for level in _LEVELS:
        values = [cell.levels[level][_METRIC] for cell in cells]
        low, high = numbers.get(level, (None, None))
        growth = "-" if low is None or high is None else f"{high / low:.1f}"
        rows.append(
            [
                level if level == "all" else f"level {level}",
                *(f"{value:.3f}" for value in values),
                f"{values[-1] / values[0]:.1f} / {growth}",
                "-" if low is None else f"{low:.2f} to {high:.2f}",
            ]
        )
    header = ["", *(str(cell.point[field]) for cell in cells), "growth, ours / printed", "printed"]
    yield from _table(f"`{name}`: {field}, s per token", header, rows)


def _by_scheduler(
    cells: Sequence[Cell], level: str, max_burst: int | None = None, **row: Any
) -> dict[str, float]:
    """A level's waiting time by scheduler, of the cells with this burst, profile and gap."""
    wanted: dict[str, Any] = {} if max_burst is None else {"workload.max_burst": max_burst}
    if row:
        wanted |= {"engine.profile": row["profile"], "workload.gap": row["gap"]}
    return {
        cell.scheduler: cell.levels[level][_METRIC]
        for cell in cells
        if all(cell.point[key] == value for key, value in wanted.items())
    }


def _spikes(results: Results) -> Iterator[str]:
    rows = []
    most = f"<= {PRINTED['figure_2d_at_most']}"
    for scenario, gap, printed in (
        ("paper-fig2c", "0.1 s", PRINTED["figure_2c"]),
        ("paper-fig2d", "1.0 s", {"HPJF": most, "SJF": most, "FCFS": most, "semantic": "-"}),
    ):
        urgent = _by_scheduler(results[scenario], "0", max_burst=100)
        semantic = urgent["semantic"]
        ratios = [f"{urgent[name] / semantic:.1f} / {printed[name]}" for name in _OTHERS]
        means = _by_scheduler(results[scenario], "all", max_burst=100)
        overall = ", ".join(f"{scheduler} {value:.2f}" for scheduler, value in means.items())
        rows.append([gap, *ratios, f"{semantic:.2f} / {printed['semantic']}", overall])
    header = ["gap", *_OTHERS, "semantic, s per token", "all levels, s per token"]
    title = "`paper-fig2c`, `paper-fig2d`: level 0 at 100 concurrent, times semantic"
    yield from _table(title + ", ours / printed", header, rows)


def _spikes_on_other_cards(cells: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for printed in PRINTED["figure_4"]:
        urgent = _by_scheduler(cells, "0", max_burst=100, **printed)
        semantic = urgent["semantic"]
        ratios = [f"{urgent[name] / semantic:.1f}" for name in _OTHERS]
        own = _beside(semantic, printed["seconds"])
        rows.append([*_setting(printed), *ratios, f"{printed['at_most']}", own])
    header = ["setting", "gap", *_OTHERS, "printed, at most", "semantic"]
    yield from _table("`paper-fig4`: level 0 at 100 concurrent, times semantic", header, rows)


def _real_engine(cells: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for printed in PRINTED["figures_3_and_5"]:
        bursts = dict.fromkeys(cell.point["workload.max_burst"] for cell in cells)
        urgent = {burst: _by_scheduler(cells, "0", max_burst=burst, **printed) for burst in bursts}
        urgent = {burst: seconds for burst, seconds in urgent.items() if seconds}
        ratios = {burst: seconds["FCFS"] / seconds["semantic"] for burst, seconds in urgent.items()}
        shown = ", ".join(f"{burst}: {ratio:.1f}" for burst, ratio in ratios.items())
        most = f"{max(ratios.values()):.1f} / {printed['at_most']}"
        own = _beside(max(seconds["semantic"] for seconds in urgent.values()), printed["seconds"])
        rows.append([*_setting(printed), shown, most, own])
    header = ["setting", "gap", "FCFS / semantic by burst", "at most", "semantic, at most"]
    yield from _table("`paper-fig3`, `paper-fig5`: level 0, ours / printed", header, rows)


def _setting(printed: Mapping[str, Any]) -> tuple[str, str]:
    return printed["profile"], f"{printed['gap']} s"


def _mixed_load(cells: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for cell in cells:
        levels = cell.levels
        ours = [
            *(levels[level]["ttft_p99"] for level in "012"),
            *(levels[level]["slo_met"] for level in "01"),
            levels["all"]["tokens_per_second"],
            levels["all"]["preemptions_per_minute"],
        ]
        row = [cell.scheduler]
        for value, theirs in zip(ours, PRINTED["mixed_load"][cell.scheduler], strict=True):
            shown = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
            row.append(f"{shown} / {theirs:g}")
        rows.append([*row, f"{levels['all']['refused']:.0f} of {levels['all']['count']:.0f}"])
    header = [
        "",
        "premium p99 TTFT, s",
        "standard",
        "background",
        "premium kept",
        "standard kept",
        "tokens/s",
        "preemptions/min",
        "refused",
    ]
    yield from _table("`tiers`: mixed load, ours / printed", header, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="write DIR/reproduction.md (default: stdout)")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate all scenarios and print or write the report; always 0."""
    started = time.perf_counter()
    results = run_scenarios(args.workers, Progress(not args.quiet))
    seconds = time.perf_counter() - started
    text = "\n".join(report(results))
    if args.output is None:
        print(text)
    else:
        (args.output / "reproduction.md").write_text(text + "\n", encoding="utf-8")
    cells = sum(map(len, results.values()))
    print(f"{cells} cells in {seconds:.0f} s on {args.workers} process(es)")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
