"""Picture of a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.lab.bench.results import Comparison
from vllm_semantic_sched.lab.bench.rounds import MixResult
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (
    ("normalized_waiting", "mean", "mean normalized waiting time [ms/token]", 1e3),
    ("ttft", "p99", "p99 time to first token [s]", 1.0),
)
"""Metric, statistic, title, and factor on seconds."""
IDLE_COLOR = "#c03030"

_COLORS = {
    "fcfs": "#8c8c8c",
    "priority": "#d98032",
    "semantic": "#2f7ebc",
    "semantic-true": "#1b9e77",
    "semantic-known": "#9467bd",
}
_VARIANT_COLORS = ("#8c564b", "#bcbd22", "#17becf", "#e377c2")


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG: mean normalized waiting time and p99 TTFT, per mix, level and scheduler.

    A line shows the idle engine for the requests of urgency 0, from the first scheduler's rounds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mixes = list(comparison.mixes)
    figure, axes = pyplot.subplots(
        len(PANELS), len(mixes), figsize=(8.4 * len(mixes), 8.4), squeeze=False, sharey="row"
    )
    for axes_row, (key, statistic, title, scale) in zip(axes, PANELS, strict=True):
        for axis, mix in zip(axes_row, mixes, strict=True):
            _bars(axis, comparison.mixes[mix], key, statistic, scale)
            _idle_line(axis, comparison.mixes[mix], key, statistic, scale)
            axis.set_title(f"mix {mix}: {title}", fontsize=12)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(len(labels), 3 * len(mixes))
    figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, fontsize=11)
    rows = math.ceil(len(labels) / columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.035 * rows))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def scheduler_color(scheduler: SchedulerSpec, place: int) -> str:
    """The color of a scheduler in every chart; `place`: its number in the comparison."""
    return _COLORS.get(scheduler.name, _VARIANT_COLORS[place % len(_VARIANT_COLORS)])


def _bars(axis: Axes, rows: dict[str, MixResult], key: str, statistic: str, scale: float) -> None:
    from matplotlib.ticker import LogLocator

    levels = list(next(iter(rows.values())).levels)
    width = 0.86 / len(rows)
    for place, row in enumerate(rows.values()):
        heights = [
            getattr(row.levels[level][key], statistic) * scale if level in row.levels else 0.0
            for level in levels
        ]
        offsets = [x + (place - (len(rows) - 1) / 2) * width for x in range(len(levels))]
        color = scheduler_color(row.scheduler, place)
        bars = axis.bar(offsets, heights, width, label=row.scheduler.title, color=color)
        labels = [f"{height:.0f}" if height >= 10 else f"{height:.2g}" for height in heights]
        axis.bar_label(bars, labels=labels, fontsize=7, padding=2, rotation=90)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xticks(range(len(levels)))
    axis.set_xticklabels(["all" if level == "all" else f"urgency {level}" for level in levels])
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _idle_line(
    axis: Axes, rows: dict[str, MixResult], key: str, statistic: str, scale: float
) -> None:
    idle = next(iter(rows.values())).idle_levels.get("0")
    if idle is not None:
        height = getattr(idle[key], statistic) * scale
        axis.axhline(
            height,
            color=IDLE_COLOR,
            linestyle="--",
            linewidth=1.4,
            label="idle engine, urgency 0",
        )
