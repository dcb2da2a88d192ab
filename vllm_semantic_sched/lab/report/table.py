"""Tables and files of a simulation's results. They depend on scenario and seed alone."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.spans import chrome_trace


def write_results(folder: Path, settings: Settings, cells: Sequence[Cell]) -> list[Path]:
    """Write results.csv (a row per cell and level) and results.json (the same and the scenario);
    returns their paths."""
    metrics, head, rows = metric_rows(cells)
    content = {
        "scenario": settings.model_dump(mode="json"),
        "metrics": {name: METRICS[name] for name in metrics},
        "results": [
            {"point": cell.point, "scheduler": cell.scheduler, "levels": cell.levels}
            for cell in cells
        ],
    }
    return write_table(folder, "results", [head, *rows], content)


def write_table(
    folder: Path, name: str, rows: Iterable[Iterable[object]], document: object
) -> list[Path]:
    """Write NAME.csv, with an empty cell for None, and NAME.json; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, facts = folder / f"{name}.csv", folder / f"{name}.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    facts.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return [table, facts]


def metric_rows(
    cells: Sequence[Cell], title: Callable[[str], str] = str
) -> tuple[list[str], list[str], list[list[str | float | None]]]:
    """Names of the metrics that any cell has, and a table of them: its columns, and a row per cell
    and level, with the level's `title`."""
    metrics = [name for name in METRICS if any(name in cell.levels[ALL] for cell in cells)]
    rows: list[list[str | float | None]] = [
        [*point_texts(cell), cell.scheduler, title(level), *map(row.get, metrics)]
        for cell in cells
        for level, row in cell.levels.items()
    ]
    return metrics, [*cells[0].point, "scheduler", "level", *metrics], rows


def write_trace(path: Path, cell: Cell) -> None:
    """Write the seats of all requests and the queue depth as a Chrome trace."""
    depths = [
        (time, {f"urgency {level}": count for level, count in enumerate(counts)})
        for time, counts in cell.depth
    ]
    path.write_text(json.dumps(chrome_trace(cell.spans, depths)) + "\n", encoding="utf-8")


def title_of(cell: Cell) -> str:
    """The scheduler and the point of the sweep."""
    return " ".join([cell.scheduler, *(f"{field}={v}" for field, v in cell.point.items())])


def level_names(cells: Sequence[Cell]) -> list[str]:
    """All rows that a cell has, most urgent first, `all` last."""
    names = {name for cell in cells for name in cell.levels} - {ALL}
    return [*sorted(names, key=int), ALL]


def point_texts(cell: Cell) -> list[str]:
    """The values of the swept fields as text."""
    return [v if isinstance(v, str) else json.dumps(v) for v in cell.point.values()]


def metric_values(cells: Sequence[Cell], level: str, metric: str) -> list[float]:
    """A metric of one level in each cell; NaN if it is not defined there."""
    return [cell.levels.get(level, {}).get(metric, math.nan) for cell in cells]


def metric_panels(cells: Sequence[Cell], axis_fields: Sequence[str]) -> dict[str, list[Cell]]:
    """The cells by panel: a scheduler and a point of all swept fields but `axis_fields`."""
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        others = [
            f"{field.split('.')[-1]}={value}"
            for field, value in cell.point.items()
            if field not in axis_fields
        ]
        panels.setdefault(", ".join([cell.scheduler, *others]), []).append(cell)
    return panels
