"""Files of a simulation's results. They depend on scenario and seed alone."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.spans import chrome_trace


def write_results(folder: Path, settings: Settings, cells: Sequence[Cell]) -> list[Path]:
    """Write results.csv (a row per cell and level) and results.json (the same and the scenario);
    returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = list(cells[0].point)
    metrics = [name for name in METRICS if any(name in cell.levels[ALL] for cell in cells)]
    table, document = folder / "results.csv", folder / "results.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*fields, "scheduler", "level", *metrics])
        for cell in cells:
            for level, row in cell.levels.items():
                values = [row.get(name, "") for name in metrics]
                writer.writerow([*point_texts(cell), cell.scheduler, level, *values])
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
