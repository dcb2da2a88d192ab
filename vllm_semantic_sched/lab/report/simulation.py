"""A simulation's results as rows, files and an HTML page. Only scenario and seed change them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from vllm_semantic_sched.lab.report.content import (
    Boxes,
    Chart,
    Line,
    Page,
    Table,
    grouped_bars,
    level_title,
    python_and_versions,
    series_colors,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.spans import chrome_trace, level_color

_MOST_CELLS = 6  # with charts over time


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


def _metric_rows(
    cells: Sequence[Cell], title: Callable[[str], str] = str
) -> tuple[list[str], list[str], list[list[str | float | None]]]:
    """Metrics that any cell has; columns; a row per cell and level, with the level's `title`."""
    metrics = [name for name in METRICS if any(name in cell.levels[ALL] for cell in cells)]
    rows: list[list[str | float | None]] = [
        [*point_texts(cell), cell.scheduler, title(level), *map(row.get, metrics)]
        for cell in cells
        for level, row in cell.levels.items()
    ]
    return metrics, [*cells[0].point, "scheduler", "level", *metrics], rows


def write_results(folder: Path, settings: Settings, cells: Sequence[Cell]) -> list[Path]:
    """Write results.csv (a row per cell and level) and results.json; returns their paths."""
    metrics, head, rows = _metric_rows(cells)
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


def write_trace(path: Path, cell: Cell) -> None:
    """Write the seats of all requests and the queue depth as a Chrome trace."""
    depths = [
        (time, {f"urgency {level}": count for level, count in enumerate(counts)})
        for time, counts in cell.depth
    ]
    path.write_text(json.dumps(chrome_trace(cell.spans, depths)) + "\n", encoding="utf-8")


def simulation_page(settings: Settings, cells: Sequence[Cell], metric: str) -> Page:
    """The chosen metric, all metrics as a table, and seats and queue depth of the first cells."""
    followed = [cell for cell in cells if cell.depth][:_MOST_CELLS]
    sentence = settings.description or "Simulated schedulers."
    if len(followed) < len(cells):
        sentence += f" Charts over time are of the first {len(followed)} of {len(cells)} cells."
    metrics, head, rows = _metric_rows(cells, level_title)
    note = "; ".join(f"{name}: {METRICS[name]}" for name in metrics)
    if settings.sweep:
        parts: list[Table | Chart] = [*_swept_charts(cells, metric, list(settings.sweep[0]))]
    else:
        parts = [_level_chart(cells, metric)]
    parts.append(Table("All metrics", head, rows, note))
    for cell in followed:
        name = " ".join([cell.scheduler, *(f"{key}={value}" for key, value in cell.point.items())])
        requests = round(cell.levels[ALL]["count"])
        parts.append(gantt_chart(f"Seats: {name}", cell.spans, requests))
        parts.append(_depth_chart(f"Queue depth: {name}", cell))
    configuration = settings.model_dump(mode="json")
    return Page("Simulation", sentence, parts, configuration, python_and_versions("numpy"))


def _level_chart(cells: Sequence[Cell], metric: str) -> Chart:
    """A bar per level and scheduler."""
    levels = level_names(cells)
    series = {
        cell.scheduler: [metric_values([cell], level, metric)[0] for level in levels]
        for cell in cells
    }
    title, colors = f"{metric}: {METRICS[metric]}", series_colors(list(series))
    return grouped_bars(title, metric, list(map(level_title, levels)), series, colors)


def _swept_charts(cells: Sequence[Cell], metric: str, axis: Sequence[str]) -> Iterator[Chart]:
    """A line per level over the sweep's first axis, in a chart per scheduler and other point."""
    charts: dict[str, list[Cell]] = {}
    for cell in cells:
        others = [
            f"{field.split('.')[-1]}={value}"
            for field, value in cell.point.items()
            if field not in axis
        ]
        charts.setdefault(", ".join([cell.scheduler, *others]), []).append(cell)
    for title, members in charts.items():
        lines = [
            Line(
                level_title(level),
                range(len(members)),
                metric_values(members, level, metric),
                "#000000" if level == ALL else level_color(int(level)),
                dashed=level == ALL,
            )
            for level in level_names(cells)
        ]
        ticks = {
            float(place): ", ".join(str(cell.point[field]) for field in axis)
            for place, cell in enumerate(members)
        }
        head = f"{metric}: {title}", ", ".join(axis), metric
        yield Chart(*head, lines, note=METRICS[metric], x_ticks=ticks, log_y=True)


def _depth_chart(title: str, cell: Cell) -> Chart:
    """Waiting requests over time, stacked by level."""
    times = [time for time, _ in cell.depth]
    half = times[0]  # the first bin starts at 0
    below = [0.0] * len(times)
    marks = []
    for level, depths in enumerate(zip(*(counts for _, counts in cell.depth), strict=True)):
        above = [foot + depth for foot, depth in zip(below, depths, strict=True)]
        name = f"urgency {level}"
        boxes = [
            (time - half, time + half, foot, top, f"{name}: {depth:.3g} waiting at {time:.4g} s")
            for time, foot, top, depth in zip(times, below, above, depths, strict=True)
            if depth
        ]
        marks.append(Boxes(name, boxes, level_color(level)))
        below = above
    return Chart(title, "seconds", "waiting requests", marks, height=260)
