"""The paper's figures and tables and the mixed-load table, ours beside the printed numbers, as
Markdown."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench import printed

if TYPE_CHECKING:
    from vllm_semantic_sched.sim.runner import Cell

_METRIC = "waiting_per_token"
_LEVELS = ("0", "1", "2", "3", "4", "all")
_MODES = ("full_batching", "immediate")
_GRID = (
    *("paper-table1", "paper-table1-script", "paper-table2", "paper-table2-script"),
    *("paper-fig2a", "paper-fig2b", "paper-fig2c", "paper-fig2d"),
    *("paper-fig3", "paper-fig4", "paper-fig5", "tiers"),
)

Results = dict[str, "list[Cell]"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched bench reproduction`."""
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="where the Markdown goes (default: stdout)")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run every scenario of the paper and write the tables."""
    started = time.perf_counter()
    results = run_grid(args.workers, args.quiet)
    seconds = time.perf_counter() - started
    text = "\n".join(report(results))
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text + "\n", encoding="utf-8")
    runs = sum(len(cells) for cells in results.values())
    print(f"{runs} cells in {seconds:.0f} s on {args.workers} process(es)")
    return 0


def run_grid(workers: int, quiet: bool = True) -> Results:
    """The cells of every scenario, by its name."""
    from tqdm import tqdm

    from vllm_semantic_sched.sim.runner import cells_of, mapped, run_task, tasks_of
    from vllm_semantic_sched.sim.scenario import load_scenarios

    tasks = {name: tasks_of(load_scenarios(name)) for name in _GRID}
    flat = [task for group in tasks.values() for task in group]
    with mapped(run_task, flat, workers) as stream:
        outcomes = list(tqdm(stream, total=len(flat), unit="run", disable=quiet))
    results, place = {}, 0
    for name, group in tasks.items():
        results[name] = cells_of(group, outcomes[place : place + len(group)])
        place += len(group)
    return results


def report(results: Results) -> Iterator[str]:
    """Lines of Markdown: a heading and a table per figure and table."""
    for name, axis, numbers in (
        ("paper-table1-script", "predictor.latency", printed.TABLE_1),
        ("paper-table1", "predictor.latency", printed.TABLE_1),
        ("paper-table2-script", "overrides.predictor.max_batch", printed.TABLE_2),
        ("paper-table2", "overrides.predictor.max_batch", printed.TABLE_2),
    ):
        yield from _big_table(name, results[name], axis, numbers)
    yield from _error_rates("paper-fig2a", results["paper-fig2a"], printed.FIGURE_2A)
    yield from _error_rates("paper-fig2b", results["paper-fig2b"], printed.FIGURE_2B)
    yield from _spikes(results)
    yield from _spikes_elsewhere(results["paper-fig4"])
    yield from _real_engine([*results["paper-fig3"], *results["paper-fig5"]])
    yield from _mixed_load(results["tiers"])


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (f"### {title}", "", f"| {' | '.join(header)} |")
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _beside(ours: float, theirs: float | None) -> str:
    return f"{ours:.2f} / {'-' if theirs is None else f'{theirs:.2f}'}"


def _big_table(
    name: str, cells: Sequence[Cell], axis: str, numbers: Sequence[Sequence[float]]
) -> Iterator[str]:
    by_mode = {
        mode: [cell for cell in cells if cell.point["overrides.predictor.mode"] == mode]
        for mode in _MODES
    }
    ordered = [cell for mode in _MODES for cell in by_mode[mode]]
    header = [""] + [
        f"{mode.split('_')[0]}, {cell.point[axis]}" for mode in _MODES for cell in by_mode[mode]
    ]
    rows, near = [], 0
    for level, theirs in zip(_LEVELS, numbers, strict=True):
        ours = [cell.levels[level][_METRIC] for cell in ordered]
        if level != "all":
            near += sum(abs(a - b) <= 0.35 * b for a, b in zip(ours, theirs, strict=True))
        label = level if level == "all" else f"urgency {level}"
        rows.append([label, *(_beside(a, b) for a, b in zip(ours, theirs, strict=True))])
    yield from _table(f"`{name}`: ours / printed, s per token", header, rows)
    yield from (f"{near} of {5 * len(ordered)} cells of levels 0 to 4 are within 35 %.", "")


def _error_rates(
    name: str, cells: Sequence[Cell], numbers: dict[str, tuple[float, float]]
) -> Iterator[str]:
    field = next(iter(cells[0].point))
    rows = []
    for level in _LEVELS:
        values = [cell.levels[level][_METRIC] for cell in cells]
        low, high = numbers.get(level, (None, None))
        growth = "-" if low is None or high is None else f"{high / low:.1f}"
        rows.append(
            [
                level if level == "all" else f"urgency {level}",
                *(f"{value:.3f}" for value in values),
                f"{values[-1] / values[0]:.1f} / {growth}",
                "-" if low is None else f"{low:.2f} to {high:.2f}",
            ]
        )
    header = ["", *(str(cell.point[field]) for cell in cells), "growth, ours / printed", "printed"]
    yield from _table(f"`{name}`: {field}, s per token", header, rows)


def _spikes(results: Results) -> Iterator[str]:
    rows = []
    for name, gap in (("paper-fig2c", "0.1 s"), ("paper-fig2d", "1.0 s")):
        at_100 = {
            cell.scheduler: cell.levels["0"][_METRIC]
            for cell in results[name]
            if cell.point["workload.max_burst"] == 100
        }
        means = {
            cell.scheduler: cell.levels["all"][_METRIC]
            for cell in results[name]
            if cell.point["workload.max_burst"] == 100
        }
        semantic = at_100["semantic"]
        theirs = [
            f"{printed.FIGURE_2C[other]}" if gap == "0.1 s" else f"<= {printed.FIGURE_2D_AT_MOST}"
            for other in ("HPJF", "SJF", "FCFS")
        ]
        ratios = [
            f"{at_100[other] / semantic:.1f} / {their}"
            for other, their in zip(("HPJF", "SJF", "FCFS"), theirs, strict=True)
        ]
        own = f"{semantic:.2f} / {printed.FIGURE_2C['semantic'] if gap == '0.1 s' else '-'}"
        overall = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
        rows.append([gap, *ratios, own, overall])
    header = ["gap", "HPJF", "SJF", "FCFS", "semantic, s per token", "all levels, s per token"]
    title = "`paper-fig2c`, `paper-fig2d`: urgency 0 at 100 concurrent, times semantic"
    yield from _table(title + ", ours / printed", header, rows)


def _spikes_elsewhere(cells: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for (profile, gap), (seconds, most) in printed.FIGURE_4.items():
        found = {
            cell.scheduler: cell.levels["0"][_METRIC]
            for cell in cells
            if cell.point["engine.profile"] == profile
            and cell.point["workload.gap"] == gap
            and cell.point["workload.max_burst"] == 100
        }
        semantic = found["semantic"]
        ratios = [f"{found[other] / semantic:.1f}" for other in ("HPJF", "SJF", "FCFS")]
        rows.append([profile, f"{gap} s", *ratios, f"{most}", _beside(semantic, seconds)])
    header = ["setting", "gap", "HPJF", "SJF", "FCFS", "printed, at most", "semantic"]
    yield from _table("`paper-fig4`: urgency 0 at 100 concurrent, times semantic", header, rows)


def _real_engine(cells: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for (profile, gap), (seconds, most) in printed.FIGURES_3_AND_5.items():
        here = [
            cell
            for cell in cells
            if cell.point["engine.profile"] == profile and cell.point["workload.gap"] == gap
        ]
        values = {
            scheduler: {
                cell.point["workload.max_burst"]: cell.levels["0"][_METRIC]
                for cell in here
                if cell.scheduler == scheduler
            }
            for scheduler in ("FCFS", "semantic")
        }
        semantic = values["semantic"]
        ratios = {burst: values["FCFS"][burst] / semantic[burst] for burst in semantic}
        shown = ", ".join(f"{burst}: {ratio:.1f}" for burst, ratio in ratios.items())
        own = _beside(max(semantic.values()), seconds)
        rows.append([profile, f"{gap} s", shown, f"{max(ratios.values()):.1f} / {most}", own])
    header = ["setting", "gap", "FCFS / semantic by burst", "at most", "semantic, at most"]
    yield from _table("`paper-fig3`, `paper-fig5`: urgency 0, ours / printed", header, rows)


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
        for value, theirs in zip(ours, printed.MIXED_LOAD[cell.scheduler], strict=True):
            row.append(f"{value:.3g} / {theirs:g}" if value < 1000 else f"{value:.0f} / {theirs:g}")
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
