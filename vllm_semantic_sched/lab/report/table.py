"""Files and pictures of a simulation's results. They depend on scenario and seed alone."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.spans import LEVEL_COLORS, chrome_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS_PER_ROW = 4


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


def draw_metric(cells: Sequence[Cell], metric: str, path: Path, axis_fields: Sequence[str]) -> None:
    """Draw a line per level over the first axis of the sweep, in a panel per scheduler and point
    of the other axes. Without a sweep: a bar per level.

    Args:
        axis_fields: swept fields of the first axis, which change together.
    """
    panels = metric_panels(cells, axis_fields)
    figure, axes = _make_panels(len(panels), height=3.4, sharey=True)
    for axis, (title, members) in zip(axes, panels.items(), strict=True):
        _draw_levels(axis, members, metric, axis_fields)
        axis.set_title(title, fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{metric}: {METRICS[metric]}", fontsize=10)
    figure.savefig(path, dpi=120)


def _make_panels(count: int, height: float, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(_PANELS_PER_ROW, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.4 * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey).flatten().tolist()
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def _draw_levels(
    axis: Axes, cells: Sequence[Cell], metric: str, axis_fields: Sequence[str]
) -> None:
    # At equal distances: the values often span decades, or are words.
    places = list(range(len(cells))) if axis_fields else []
    labels = ["\n".join(str(cell.point[field]) for field in axis_fields) for cell in cells]
    for index, level in enumerate(level_names(cells)):
        heights = metric_values(cells, level, metric)
        color = "black" if level == ALL else LEVEL_COLORS[index % len(LEVEL_COLORS)]
        name = level if level == ALL else f"urgency {level}"
        if axis_fields:
            style = "--" if level == ALL else "-"
            axis.plot(places, heights, style, marker="o", ms=3, color=color, label=name)
        else:
            axis.bar([index], heights, color=color, label=name)
    axis.set_xticks(places, labels if axis_fields else [])
    axis.set_xlabel(", ".join(axis_fields), fontsize=8)
    axis.set_yscale("log")
    axis.grid(axis="y", alpha=0.3)


def draw_depths(cells: Sequence[Cell], path: Path) -> None:
    """Draw the number of waiting requests over time, stacked by level, in a panel per cell."""
    figure, axes = _make_panels(len(cells), height=3.0)
    for axis, cell in zip(axes, cells, strict=True):
        times = [time for time, _ in cell.depth]
        layers = list(zip(*(counts for _, counts in cell.depth), strict=True))
        colors = [LEVEL_COLORS[level % len(LEVEL_COLORS)] for level in range(len(layers))]
        names = [f"urgency {level}" for level in range(len(layers))]
        axis.stackplot(times, layers, colors=colors, labels=names)
        axis.set_title(title_of(cell), fontsize=9)
        axis.set_xlabel("seconds", fontsize=8)
        axis.set_ylabel("waiting requests", fontsize=8)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
