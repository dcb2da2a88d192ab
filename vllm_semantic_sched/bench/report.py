"""Shows a comparison: a table per urgency level, and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_semantic_sched.bench.console import make_table
from vllm_semantic_sched.bench.metrics import METRICS, Metric, Summary
from vllm_semantic_sched.bench.results import Comparison, MixResult
from vllm_semantic_sched.bench.targets import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REFERENCE = "fcfs"
_COLORS = ("#8c8c8c", "#d98032", "#2f7ebc", "#1b9e77", "#8c564b", "#9467bd")


def print_mix(console: Console, mix: str, rows: dict[str, MixResult]) -> None:
    """Print totals and one table per urgency level for one mix of levels."""
    first = next(iter(rows.values()))
    console.print()
    rounds = len(first.rounds)
    times = f", {rounds} times" if rounds > 1 else ""
    console.rule(f"mix {mix}: {len(first.workload.requests)} requests{times}")
    console.print(f"answer lengths: {first.workload.length_source}")
    console.print(_totals(rows))
    for level in first.levels:
        console.print(_level_table(level, rows))
    console.print(
        "Each cell is mean, p50, p99. norm. waiting = (finish - arrival) / output tokens; "
        "slowdown = E2E / E2E of the same request on an idle engine (fitted); "
        "gain = FCFS / this row."
    )


def print_targets(console: Console, targets: list[Target]) -> None:
    """Print each target with what was measured."""
    table = Table(title="targets", box=box.SIMPLE)
    for column in ("target", "measured", "wanted", ""):
        table.add_column(column, justify="left" if column in ("target", "") else "right")
    for target in targets:
        verdict = "[green]met[/]" if target.met else "[red]missed[/]"
        wanted = f"at {'most' if target.at_most else 'least'} {target.required:g}"
        table.add_row(target.text, f"{target.measured:.3g}", wanted, verdict)
    console.print(table)


def print_problems(console: Console, problems: Iterable[str]) -> int:
    """Print why a command fails; its exit status, 0 if there is no problem."""
    status = 0
    for problem in problems:
        console.print(f"[red]{problem}[/]", soft_wrap=True)
        status = 1
    return status


def _totals(rows: dict[str, MixResult]) -> Table:
    table = make_table(
        "totals",
        "scheduler",
        "answered",
        "output tok/s",
        "vs FCFS",
        "overload",
        "preemptions",
        "outputs differ",
        "latest send",
        "CPU used elsewhere",
    )
    first = next(iter(rows.values()))
    reference = rows.get(_REFERENCE)
    for row in rows.values():
        ratio = row.tokens_per_second / reference.tokens_per_second if reference else None
        compared = row is not first or len(row.rounds) > 1
        differ = f"{len(row.counted_differences)} ({len(row.differences)} with near ties)"
        table.add_row(
            row.scheduler.title,
            f"{row.requests - len(row.failed)}/{row.requests}",
            _with_range(row.tokens_per_second, [done.tokens_per_second for done in row.rounds]),
            "-" if ratio is None else f"{ratio:.3f}",
            f"{row.overload:.1f}x",
            f"{row.counters.get('vllm:num_preemptions_total', 0):.0f}",
            differ if compared else "-",
            f"{row.latest_send:.2f} s",
            f"{row.elsewhere:.0%}",
        )
    return table


def _with_range(pooled: float, rounds: list[float]) -> str:
    """The pooled value and, of several rounds, the lowest and highest."""
    span = f" ({min(rounds):.0f}-{max(rounds):.0f})" if len(rounds) > 1 else ""
    return f"{pooled:.0f}{span}"


def _level_table(level: str, rows: dict[str, MixResult]) -> Table:
    title = "all levels" if level == "all" else f"urgency {level}"
    if level == "0":
        title += " (most urgent)"
    count = next(iter(rows.values())).levels[level][METRICS[0].key].count
    table = Table(title=f"{title}, {count} requests", box=box.SIMPLE)
    table.add_column("scheduler", no_wrap=True)
    for metric in METRICS:
        table.add_column(f"{metric.title},\n{metric.unit}", justify="right", no_wrap=True)
    table.add_column("norm.w.\ngain", justify="right")
    table.add_column("p99 TTFT\ngain", justify="right")
    reference = rows.get(_REFERENCE)
    for row in rows.values():
        summaries = row.levels.get(level)
        if summaries is None:
            table.add_row(row.scheduler.title, *["-"] * (len(METRICS) + 2))
            continue
        cells = [_cell(summaries[metric.key], metric) for metric in METRICS]
        ratios = ["-", "-"]
        if reference is not None and level in reference.levels:
            base = reference.levels[level]
            ratios = [
                f"{base['normalized_waiting'].mean / summaries['normalized_waiting'].mean:.2f}x",
                f"{base['ttft'].p99 / summaries['ttft'].p99:.2f}x",
            ]
        table.add_row(row.scheduler.title, *cells, *ratios)
    return table


def _cell(summary: Summary, metric: Metric) -> str:
    values = (summary.mean, summary.p50, summary.p99)
    return " ".join(_short(value * metric.scale) for value in values)


def _short(value: float) -> str:
    """About three digits, always five characters or so, so that columns line up."""
    for limit, digits in ((10, 3), (100, 2), (1000, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def draw(comparison: Comparison, path: Path) -> None:
    """Write a PNG: mean normalized waiting time and p99 TTFT, per mix, level and scheduler."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("normalized_waiting", "mean", "mean normalized waiting time [ms/token]", 1e3),
        ("ttft", "p99", "p99 time to first token [s]", 1.0),
    )
    mixes = list(comparison.mixes)
    figure, axes = pyplot.subplots(
        len(panels), len(mixes), figsize=(7.2 * len(mixes), 8), squeeze=False, sharey="row"
    )
    for axes_row, (key, statistic, title, scale) in zip(axes, panels, strict=True):
        for axis, mix in zip(axes_row, mixes, strict=True):
            _bars(axis, comparison.mixes[mix], key, statistic, scale)
            axis.set_title(f"mix {mix}: {title}", fontsize=11)
    axes_row = axes[0]
    handles, labels = axes_row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axis: Axes, rows: dict[str, MixResult], key: str, statistic: str, scale: float) -> None:
    levels = list(next(iter(rows.values())).levels)
    width = 0.82 / len(rows)
    for place, row in enumerate(rows.values()):
        heights = [
            getattr(row.levels[level][key], statistic) * scale if level in row.levels else 0.0
            for level in levels
        ]
        offsets = [x + (place - (len(rows) - 1) / 2) * width for x in range(len(levels))]
        bars = axis.bar(
            offsets, heights, width, label=row.scheduler.title, color=_COLORS[place % len(_COLORS)]
        )
        labels = [f"{height:.0f}" if height >= 10 else f"{height:.2g}" for height in heights]
        axis.bar_label(bars, labels=labels, fontsize=6, padding=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xticks(range(len(levels)))
    axis.set_xticklabels(["all" if level == "all" else f"urgency {level}" for level in levels])
    axis.grid(axis="y", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
