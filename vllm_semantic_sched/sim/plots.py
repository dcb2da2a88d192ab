"""Pictures of the results: a metric over the swept field, and who had a seat when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.output import level_names
from vllm_semantic_sched.sim.runner import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVEL_COLORS = ("#c0392b", "#e08e0b", "#27915b", "#2f7ebc", "#7d6aa8", "#8c8c8c")
_EDGES = {"finish": "black", "recompute": "#c0392b", "swap": "#2f7ebc"}
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
        heights = [
            cell.levels[level][metric] if level in cell.levels else float("nan") for cell in cells
        ]
        color = "black" if level == ALL else _LEVEL_COLORS[index % len(_LEVEL_COLORS)]
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


def draw_gantt(cell: Cell, path: Path) -> None:
    """Who had a seat when: a row per request, a dot at its arrival, an edge that says how the
    time ended (black finished, red KV dropped, blue KV kept on the host)."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    requests = {bar.request: bar for bar in cell.bars}
    figure = Figure(figsize=(9, 1.2 + 0.16 * len(requests)), layout="constrained")
    axis = figure.subplots()
    for bar in cell.bars:
        color = _LEVEL_COLORS[bar.level % len(_LEVEL_COLORS)]
        axis.barh(bar.request, bar.end - bar.start, left=bar.start, height=0.8, color=color)
        axis.plot(
            [bar.end, bar.end],
            [bar.request - 0.45, bar.request + 0.45],
            color=_EDGES[bar.end_kind],
            linewidth=1.6,
        )
    for request, bar in requests.items():
        axis.plot(bar.arrival, request, "k.", ms=3)
    levels = sorted({bar.level for bar in cell.bars})
    handles: list[Any] = [
        Patch(color=_LEVEL_COLORS[level % len(_LEVEL_COLORS)], label=f"urgency {level}")
        for level in levels
    ]
    handles += [Line2D([], [], color=color, label=kind) for kind, color in _EDGES.items()]
    handles.append(Line2D([], [], color="black", marker=".", linestyle="", label="arrival"))
    figure.legend(handles=handles, loc="outside lower center", ncols=9, frameon=False, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_ylabel("request")
    point = ", ".join(f"{field}={value}" for field, value in cell.point.items())
    axis.set_title(f"{cell.scheduler} {point}".strip(), fontsize=10)
    figure.savefig(path, dpi=120)
