"""Results as files and as a table. The files depend on scenario and seed alone."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.spans import chrome_trace

_ALWAYS_SHOWN = ("ttft_p99", "slo_met", "refused", "recomputes", "swaps")


def write_results(folder: Path, settings: Settings, cells: Sequence[Cell]) -> list[Path]:
    """Write results.csv (a row per cell and level) and results.json (that and the scenario)."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = list(cells[0].point)
    metrics = [name for name in METRICS if any(name in cell.levels[ALL] for cell in cells)]
    table, document = folder / "results.csv", folder / "results.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*fields, "scheduler", "level", *metrics])
        for cell in cells:
            for level, row in cell.levels.items():
                values = [_plain(cell.point[field]) for field in fields]
                writer.writerow(
                    [*values, cell.scheduler, level, *(row.get(name, "") for name in metrics)]
                )
    content = {
        "scenario": settings.model_dump(mode="json"),
        "metrics": {name: METRICS[name] for name in metrics},
        "results": [
            {"point": cell.point, "scheduler": cell.scheduler, "levels": cell.levels}
            for cell in cells
        ],
    }
    document.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return [table, document]


def print_results(console: Console, settings: Settings, cells: Sequence[Cell], metric: str) -> None:
    """Print one metric: a row per cell, a column per level."""
    levels = level_names(cells)
    if settings.description:
        console.print(settings.description, soft_wrap=True)
    table = Table(title=f"{metric}: {METRICS[metric]}", box=box.SIMPLE)
    fields = list(cells[0].point)
    for field in fields:
        table.add_column(field, no_wrap=True)
    table.add_column("scheduler", no_wrap=True)
    for level in levels:
        table.add_column(level if level == ALL else f"urgency {level}", justify="right")
    extra = [
        name for name in ("ttft_p99", "slo_met", "refused", "recomputes", "swaps") if name != metric
    ]
    for name in extra:
        table.add_column(f"{name},\nall", justify="right")
    previous: list[str] | None = None
    for cell in cells:
        point = [_plain(cell.point[field]) for field in fields]
        if previous is not None and point != previous:
            table.add_section()
        shown = point if point != previous else [""] * len(fields)
        previous = point
        table.add_row(
            *shown,
            cell.scheduler,
            *(number(cell.levels.get(level, {}).get(metric, math.nan)) for level in levels),
            *(number(cell.levels[ALL].get(name, math.nan)) for name in extra),
        )
    console.print(table)


def write_trace(path: Path, cell: Cell) -> None:
    """Write who had a seat when, and how many waited, as a Chrome trace."""
    depths = [
        (time, {f"urgency {level}": count for level, count in enumerate(counts)})
        for time, counts in cell.depth
    ]
    path.write_text(json.dumps(chrome_trace(cell.spans, depths)) + "\n", encoding="utf-8")


def title_of(cell: Cell) -> str:
    """The scheduler and the point of the sweep."""
    return " ".join([cell.scheduler, *(f"{field}={v}" for field, v in cell.point.items())])


def level_names(cells: Sequence[Cell]) -> list[str]:
    """The rows that any of the cells has, most urgent first, `all` last."""
    names = {name for cell in cells for name in cell.levels} - {ALL}
    return [*sorted(names, key=int), ALL]


def number(value: float) -> str:
    """About three digits, counts in full, a dash for what there is not."""
    if math.isnan(value):
        return "-"
    if value == round(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
