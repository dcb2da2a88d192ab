"""Picture of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.lab.bench.metrics import Summary
from vllm_semantic_sched.lab.bench.results import Comparison, Rows
from vllm_semantic_sched.lab.report.content import level_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE_COLOR, IDLE_LABEL = "#c03030", "idle engine, urgency 0"

_COLORS = {
    "fcfs": "#8c8c8c",
    "priority": "#d98032",
    "semantic": "#2f7ebc",
    "semantic-true": "#1b9e77",
    "semantic-known": "#9467bd",
}
_VARIANT_COLORS = ("#8c564b", "#bcbd22", "#17becf", "#e377c2")


def statistic_of(summaries: Mapping[str, Summary], metric: str, statistic: str) -> float:
    """Return a statistic of a metric; NaN if nothing was measured."""
    return getattr(summaries[metric], statistic) if metric in summaries else math.nan


PANELS = {
    "mean normalized waiting time [ms/token]": ("normalized_waiting", "mean", 1e3),
    "p99 time to first token [s]": ("ttft", "p99", 1.0),
}
"""By title: a metric, its statistic that is drawn as bars, and a factor on seconds."""


def bars(
    rows: Rows, metric: str, statistic: str, scale: float
) -> tuple[dict[str, list[float]], dict[str, str], float]:
    """Heights by level and the color of each scheduler, by its title, and the height of the idle
    engine for urgency 0, from the first scheduler's rounds; NaN where there is none."""
    first = next(iter(rows.values()))

    def height(levels: Mapping[str, Mapping[str, Summary]], level: str) -> float:
        return scale * statistic_of(levels.get(level, {}), metric, statistic)

    heights, colors = {}, {}
    for place, row in enumerate(rows.values()):
        title, other = row.scheduler.title, _VARIANT_COLORS[place % len(_VARIANT_COLORS)]
        colors[title] = _COLORS.get(row.scheduler.name, other)
        heights[title] = [height(row.levels, level) for level in first.levels]
    return heights, colors, height(first.idle_levels, "0")


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG of `PANELS` per mix, level and scheduler, with the idle engine as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mixes = list(comparison.mixes)
    figure, axes = pyplot.subplots(
        len(PANELS), len(mixes), figsize=(8.4 * len(mixes), 8.4), squeeze=False, sharey="row"
    )
    for axes_row, title in zip(axes, PANELS, strict=True):
        for axis, mix in zip(axes_row, mixes, strict=True):
            _draw(axis, comparison.mixes[mix], *PANELS[title])
            axis.set_title(f"mix {mix}: {title}", fontsize=12)
    handles, labels = axes[0][0].get_legend_handles_labels()
    columns = min(len(labels), 3 * len(mixes))
    figure.legend(handles, labels, loc="upper center", ncols=columns, frameon=False, fontsize=11)
    rows = math.ceil(len(labels) / columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.035 * rows))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axis: Axes, rows: Rows, metric: str, statistic: str, scale: float) -> None:
    from matplotlib.ticker import LogLocator

    levels = list(next(iter(rows.values())).levels)
    series, colors, idle = bars(rows, metric, statistic, scale)
    width = 0.86 / len(series)
    for place, (title, found) in enumerate(series.items()):
        heights = [0.0 if math.isnan(height) else height for height in found]
        offsets = [x + (place - (len(series) - 1) / 2) * width for x in range(len(levels))]
        drawn = axis.bar(offsets, heights, width, label=title, color=colors[title])
        labels = [f"{height:.0f}" if height >= 10 else f"{height:.2g}" for height in heights]
        axis.bar_label(drawn, labels=labels, fontsize=7, padding=2, rotation=90)
    if not math.isnan(idle):
        axis.axhline(idle, color=IDLE_COLOR, linestyle="--", linewidth=1.4, label=IDLE_LABEL)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xticks(range(len(levels)), list(map(level_title, levels)))
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
