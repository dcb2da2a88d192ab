"""Results of a run, simulated or logged, as rows, files and an HTML page. Only scenario and seed
change those of a simulation."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.policy.record.spans import Span, level_color
from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings

_MOST_CELLS = 6  # with charts over time
_MOST_POINTS = 2000  # of a line


def level_names(cells: Sequence[Cell]) -> list[str]:
    """All rows that a cell has, most urgent first, `all` last."""
    return [*sorted({name for cell in cells for name in cell.levels} - {ALL}, key=int), ALL]


def point_texts(cell: Cell) -> list[str]:
    """The values of the swept fields as text."""
    values = cell.point.values()
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


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
    table = folder / f"{name}.csv"
    facts = folder / f"{name}.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    facts.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return [table, facts]


def simulation_page(
    settings: Settings, cells: Sequence[Cell], metric: str, title: str = "Simulation"
) -> Page:
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
    return Page(title, sentence, parts, configuration, python_and_versions("numpy"))


def _level_chart(cells: Sequence[Cell], metric: str) -> Chart:
    levels = level_names(cells)
    series = {
        cell.scheduler: [metric_values([cell], level, metric)[0] for level in levels]
        for cell in cells
    }
    return grouped_bars(
        f"{metric}: {METRICS[metric]}",
        metric,
        groups=list(map(level_title, levels)),
        series=series,
        colors=series_colors(list(series)),
    )


def _swept_charts(cells: Sequence[Cell], metric: str, axis: Sequence[str]) -> Iterator[Chart]:
    """A line per level over the sweep's first axis, in a chart per scheduler and other point."""
    charts: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        others = [
            f"{field.rpartition('.')[2]}={value}"
            for field, value in cell.point.items()
            if field not in axis
        ]
        charts[", ".join([cell.scheduler, *others])].append(cell)
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
        yield Chart(
            f"{metric}: {title}",
            x_label=", ".join(axis),
            y_label=metric,
            marks=lines,
            note=METRICS[metric],
            x_ticks=ticks,
            log_y=True,
        )


def _depth_chart(title: str, cell: Cell) -> Chart:
    """Waiting requests over time, stacked by level."""
    half = cell.depth[0][0]  # the first bin starts at 0
    boxes: list[list[tuple[float, float, float, float, str]]] = [[] for _ in cell.depth[0][1]]
    for time, depths in cell.depth:
        foot = 0.0
        for level, depth in enumerate(depths):
            text = f"urgency {level}: {depth:.3g} waiting at {time:.4g} s"
            if depth:
                boxes[level].append((time - half, time + half, foot, foot + depth, text))
            foot += depth
    marks = [Boxes(f"urgency {n}", own, level_color(n)) for n, own in enumerate(boxes)]
    return Chart(title, "seconds", "waiting requests", marks, height=260)


def trace_page(
    rows: Sequence[Mapping[str, Any]],
    spans: Sequence[Span],
    reader: LogReader,
    options: Mapping[str, object],
) -> Page:
    """A table per tier, seats, and queue depths: from the rows (`TierSummary.row` with level and
    tier), the spans to draw in order of arrival, and the reader after reading."""
    requests = sum(row["requests"] for row in rows)
    sentence = f"{requests} requests of an event log. Times are seconds since its first line."
    if reader.unreadable:
        sentence += f" {reader.unreadable} lines could not be read."
    kinds = {kind: None for row in rows for kind in row["preemptions"]}
    figures = [name for name in rows[0] if name != "preemptions"]
    cells = []
    for row in rows:
        counts = (row["preemptions"].get(kind, 0) for kind in kinds)
        cells.append([*(row[name] for name in figures), *counts])
    table = Table(
        "Tiers",
        [*(name.replace("_", " ") for name in figures), *kinds],
        cells,
        note="Times in seconds; held: sum over all requests. Last columns: preemptions by what "
        "happened to the KV.",
    )
    parts = table, gantt_chart("Seats", spans, requests), _tier_depths(reader)
    return Page("Event log", sentence, parts, options, python_and_versions("vllm"))


def _tier_depths(reader: LogReader) -> Chart:
    depths = reader.depths[:: len(reader.depths) // _MOST_POINTS + 1]
    times = [time for time, _ in depths]
    tiers = sorted({tier for _, counts in depths for tier in counts})
    colors = series_colors(tiers)
    lines = [
        Line(tier, times, [counts.get(tier, 0) for _, counts in depths], colors[tier], steps=True)
        for tier in tiers
    ]
    note = "Until the last of the requests in trace.json ended."
    return Chart("Queue depth", "seconds", "waiting requests", lines, note=note, height=260)
