"""Pictures of the results: a metric over the swept field, and queue depth over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.output import level_names, title_of
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.spans import LEVEL_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS_PER_ROW = 4


def draw_lines(cells: Sequence[Cell], metric: str, path: Path, axis_fields: Sequence[str]) -> None:
    """A line per level over the first axis of the sweep; a panel for each scheduler and each
    point of the other axes. Without a sweep: bars per level.

    Args:
        axis_fields: swept fields of the first axis, which change together.
    """
    from matplotlib.figure import Figure

    panels = _panels(cells, axis_fields)
    columns = min(_PANELS_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    places = [axis for row in axes for axis in row]
    for axis, (title, members) in zip(places, panels.items(), strict=False):
        _lines(axis, members, metric, axis_fields)
        axis.set_title(title, fontsize=9)
    for axis in places[len(panels) :]:
        axis.set_visible(False)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{metric}: {METRICS[metric]}", fontsize=10)
    figure.savefig(path, dpi=120)


def _panels(cells: Sequence[Cell], axis_fields: Sequence[str]) -> dict[str, list[Cell]]:
    others_of = [field for field in cells[0].point if field not in axis_fields]
    panels: dict[str, list[Cell]] = {}
    for cell in cells:
        others = [f"{field.split('.')[-1]}={cell.point[field]}" for field in others_of]
        panels.setdefault(", ".join([cell.scheduler, *others]), []).append(cell)
    return panels


def _lines(axis: Axes, cells: Sequence[Cell], metric: str, axis_fields: Sequence[str]) -> None:
    # Side by side at equal distances: the values often span decades, or are words.
    places = list(range(len(cells)))
    labels = ["\n".join(str(cell.point[field]) for field in axis_fields) for cell in cells]
    levels = level_names(cells)
    for index, level in enumerate(levels):
        heights = [cell.levels.get(level, {}).get(metric, float("nan")) for cell in cells]
        color = "black" if level == ALL else LEVEL_COLORS[index % len(LEVEL_COLORS)]
        name = level if level == ALL else f"urgency {level}"
        if not axis_fields:
            axis.bar([index], heights, color=color, label=name)
        else:
            style = "--" if level == ALL else "-"
            axis.plot(places, heights, style, marker="o", ms=3, color=color, label=name)
    axis.set_xticks(places if axis_fields else [], labels if axis_fields else [])
    axis.set_xlabel(", ".join(axis_fields), fontsize=8)
    axis.set_yscale("log")
    axis.grid(axis="y", alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def draw_depths(cells: Sequence[Cell], path: Path) -> None:
    """How many requests wait over time, stacked by level: a panel per cell."""
    from matplotlib.figure import Figure

    columns = min(_PANELS_PER_ROW, len(cells))
    rows = -(-len(cells) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.0 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    places = [axis for row in axes for axis in row]
    for axis, cell in zip(places, cells, strict=False):
        times = [time for time, _ in cell.depth]
        layers = list(zip(*(counts for _, counts in cell.depth), strict=True))
        colors = [LEVEL_COLORS[level % len(LEVEL_COLORS)] for level in range(len(layers))]
        names = [f"urgency {level}" for level in range(len(layers))]
        axis.stackplot(times, layers, colors=colors, labels=names)
        axis.set_title(title_of(cell), fontsize=9)
        axis.set_xlabel("seconds", fontsize=8)
        axis.set_ylabel("waiting requests", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in places[len(cells) :]:
        axis.set_visible(False)
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)
