"""Results of a run, simulated or logged, as rows, files and an HTML page. Only scenario and seed
change those of a simulation."""

import csv
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_semantic_sched.lab.report.content import (
    LOGARITHMIC,
    Boxes,
    Chart,
    Line,
    Page,
    Table,
    beside,
    compared,
    grouped_values,
    groups_text,
    is_logarithmic,
    level_title,
    names_text,
    number_text,
    python_and_versions,
    series_colors,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.policy.order.inversions import InversionCause
from vllm_semantic_sched.policy.record.spans import Span, level_color
from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.sections import Settings

METRIC_NAMES = {
    "count": "requests",
    "refused": "refused",
    "requests_per_second": "requests/s",
    "normalized_waiting": "normalized waiting (s/token)",
    "waiting_per_token": "waiting per token (s)",
    "e2e_mean": "latency, mean (s)",
    "e2e_p50": "latency, p50 (s)",
    "e2e_p99": "latency, p99 (s)",
    "ttft_mean": "TTFT, mean (s)",
    "ttft_p99": "TTFT, p99 (s)",
    "tpot_mean": "TPOT, mean (s)",
    "program_mean": "program, mean (s)",
    "program_p99": "program, p99 (s)",
    "queueing_mean": "wait for a seat, mean (s)",
    "held_mean": "held, mean (s)",
    "recomputes": "preemptions, KV dropped",
    "swaps": "preemptions, KV kept",
    "preemptions_per_minute": "preemptions/min",
    "tokens_per_second": "output tokens/s",
    "finish_order_violations": "finish order violations (share)",
    "seat_order_violations": "seat order violations (share)",
    **{f"seat_order_{cause.value}": f"of these: {cause.value}" for cause in InversionCause},
    "fairness": "fairness (Jain's index)",
    "slo_met": "SLO met (share)",
    "goodput": "goodput (requests/s)",
}
"""What the metrics of a simulation are called on a page."""

_MAIN = (
    "count", "ttft_p99", "e2e_mean", "normalized_waiting", "slo_met", "refused",
    "preemptions_per_minute", "ttft_mean", "e2e_p99",
)  # fmt: skip
"""Metrics of the main table, most important first."""
_EVENTS = ("refused", "preemptions_per_minute")  # left out if there was none
_MOST_COLUMNS = 10
_LEAST_METRICS = 2
_RANGES = {
    "ttft_mean": ("ttft_mean", "ttft_p99"),
    "ttft_p99": ("ttft_mean", "ttft_p99"),
    "e2e_mean": ("e2e_p50", "e2e_p99"),
    "e2e_p50": ("e2e_p50", "e2e_p99"),
    "e2e_p99": ("e2e_p50", "e2e_p99"),
}
_TIMES = {
    "queueing_delay_p50": "wait, p50 (s)",
    "queueing_delay_p99": "wait, p99 (s)",
    "ttft_p50": "TTFT, p50 (s)",
    "ttft_p99": "TTFT, p99 (s)",
    "e2e_p50": "latency, p50 (s)",
    "e2e_p99": "latency, p99 (s)",
}
_TIER_COLUMNS = (
    "level", "tier", "requests", "ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99",
    "completed", "refused", "failed", "cancelled", "unfinished",
)  # fmt: skip
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
    cells: Sequence[Cell],
) -> tuple[list[str], list[str], list[list[str | float | None]]]:
    """Metrics that any cell has; columns; a row per cell and level."""
    metrics = [name for name in METRICS if any(name in cell.levels[ALL] for cell in cells)]
    rows: list[list[str | float | None]] = [
        [*point_texts(cell), cell.scheduler, level, *map(row.get, metrics)]
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
    settings: Settings,
    cells: Sequence[Cell],
    metric: str,
    reference: str | None = None,
    title: str = "",
) -> Page:
    """Seats of the reference (the name of a scheduler) and of the last scheduler, the chosen
    metric, the most used metrics as a table, seats of the others, queue depths, and all metrics."""
    names = names_text(cell.scheduler for cell in cells)
    recorded = [cell for cell in cells if cell.depth]
    followed = recorded[:_MOST_CELLS]
    sentences = [settings.description or "Simulated schedulers."]
    if len(followed) < len(recorded):
        sentences.append(
            f"Charts over time are of the first {len(followed)} of {len(recorded)} cells."
        )
    seats = _seat_charts(followed, reference)
    metrics, head, rows = _metric_rows(cells)
    parts: list[Table | Chart] = [*beside(seats[:2])]
    if settings.sweep:
        axes = [list(axis) for axis in settings.sweep]
        names += f" over {', '.join(itertools.chain(*axes))}"
        parts += _swept_charts(cells, metric, axes[0])
    else:
        parts.append(_level_chart(cells, metric, reference))
    parts.append(_main_table(cells, metric))
    parts += beside(seats[2:])
    depths = [_depth_chart(f"Queue depth: {_cell_title(cell)}", cell) for cell in followed]
    parts += beside(depths)
    note = "; ".join(f"{METRIC_NAMES[name]}: {METRICS[name]}" for name in metrics)
    named = [METRIC_NAMES.get(name, name) for name in head]
    parts.append(Table("All metrics", named, rows, note, folded=True))
    configuration = settings.model_dump(mode="json")
    return Page(
        title or f"semsched simulate: {names}",
        "\n".join(sentences),
        parts,
        configuration,
        python_and_versions("numpy"),
    )


def _cell_title(cell: Cell) -> str:
    return ", ".join([cell.scheduler, *(f"{key}={value}" for key, value in cell.point.items())])


def _seat_charts(cells: Sequence[Cell], reference: str | None) -> list[Chart]:
    """The reference's seats and the last scheduler's at the first point come first."""
    if not cells:
        return []
    at_first = [cell for cell in cells if cell.point == cells[0].point]
    first = next((cell for cell in at_first if cell.scheduler == reference), at_first[0])
    others = [cell for cell in at_first if cell is not first]
    pair = [first, *others[-1:]]
    charts = []
    for cell in [*pair, *(other for other in cells if other not in pair)]:
        same_point = (other for other in cells if other.point == cell.point)
        before = next((other for other in same_point if other.scheduler == reference), None)
        known = None
        if before is not None and before is not cell:
            known = before.scheduler, before.spans
        requests = round(cell.levels[ALL]["count"])
        charts.append(gantt_chart(f"Seats: {_cell_title(cell)}", cell.spans, requests, known))
    return charts


def _main_table(cells: Sequence[Cell], metric: str) -> Table:
    """Level and the metrics that most readers ask for, as far as they say something here."""
    places = _MOST_COLUMNS - len(cells[0].point) - 2
    wanted = [name for name in dict.fromkeys([metric, *_MAIN]) if _says_something(cells, name)]
    shown = wanted[: max(_LEAST_METRICS, places)]
    columns = [name for name in METRICS if name in shown]
    rows: list[list[str | float | None]] = [
        [*point_texts(cell), cell.scheduler, level, *map(row.get, columns)]
        for cell in cells
        for level, row in cell.levels.items()
    ]
    titles = [METRIC_NAMES[name] for name in columns]
    note = "results.csv, and the table of all metrics below, have the others."
    return Table("By level", [*cells[0].point, "scheduler", "level", *titles], rows, note)


def _says_something(cells: Sequence[Cell], metric: str) -> bool:
    """Whether a metric is defined, and a count not 0 everywhere."""
    values = [row[metric] for cell in cells for row in cell.levels.values() if metric in row]
    return any(values) or (bool(values) and metric not in _EVENTS)


def _level_chart(cells: Sequence[Cell], metric: str, reference: str | None) -> Chart:
    levels = level_names(cells)
    series = {
        cell.scheduler: [metric_values([cell], level, metric)[0] for level in levels]
        for cell in cells
    }
    ranges = {}
    if metric in _RANGES:
        for cell in cells:
            low, high = (
                [metric_values([cell], level, name)[0] for level in levels]
                for name in _RANGES[metric]
            )
            ranges[cell.scheduler] = list(zip(low, high, strict=True))
    note = f"{METRICS[metric]}."
    if ranges:
        low_name, high_name = (METRIC_NAMES[name] for name in _RANGES[metric])
        note += f" Thin lines: from {low_name} to {high_name}."
    groups = list(map(level_title, levels))
    return grouped_values(
        f"{_title(metric)} by level",
        METRIC_NAMES[metric],
        groups=groups,
        series=series,
        colors=series_colors(list(series)),
        ranges=ranges,
        sentence=groups_text(groups, series, reference),
        note=note,
    )


def _title(metric: str) -> str:
    name = METRIC_NAMES[metric]
    return name[0].upper() + name[1:]


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
        levels = level_names(members)
        values = {level: metric_values(members, level, metric) for level in levels}
        lines = [
            Line(
                level_title(level),
                range(len(members)),
                values[level],
                "#000000" if level == ALL else level_color(int(level)),
                dashed=level == ALL,
            )
            for level in levels
        ]
        ticks = {
            float(place): ", ".join(str(cell.point[field]) for field in axis)
            for place, cell in enumerate(members)
        }
        log = is_logarithmic(itertools.chain(*values.values()))
        yield Chart(
            f"{_title(metric)}: {title}",
            x_label=", ".join(axis),
            y_label=METRIC_NAMES[metric],
            marks=lines,
            sentence=_swept_sentence(values, list(ticks.values())),
            note=f"{METRICS[metric]}. {LOGARITHMIC}" if log else f"{METRICS[metric]}.",
            x_ticks=ticks,
            log_y=log,
        )


def _swept_sentence(values: Mapping[str, Sequence[float]], ticks: Sequence[str]) -> str:
    """How far the most and the least urgent level went from the first point to the last."""
    levels = [level for level in values if level != ALL]
    texts = []
    for level in dict.fromkeys([levels[0], levels[-1]] if levels else []):
        first, *_, last = [values[level][0], *values[level]]
        words = compared(last, first, "lower", "as high")
        text = f"{level_title(level)} {number_text(first)} and {number_text(last)}"
        texts.append(f"{text} ({words})" if words else text)
    return f"At {ticks[0]} and at {ticks[-1]}: {'; '.join(texts)}." if texts else ""


def _depth_chart(title: str, cell: Cell) -> Chart:
    """Waiting requests over time, stacked by level."""
    half = cell.depth[0][0]  # the first bin starts at 0
    boxes: list[list[tuple[float, float, float, float, str]]] = [[] for _ in cell.depth[0][1]]
    for time, depths in cell.depth:
        foot = 0.0
        for level, depth in enumerate(depths):
            text = f"level {level}: {depth:.3g} waiting at {time:.4g} s"
            if depth:
                boxes[level].append((time - half, time + half, foot, foot + depth, text))
            foot += depth
    marks = [Boxes(level_title(f"{n}"), own, level_color(n)) for n, own in enumerate(boxes)]
    totals = [(sum(depths), time) for time, depths in cell.depth]
    most, when = max(totals, key=lambda total: total[0])
    mean = sum(total for total, _ in totals) / len(totals)
    sentence = (
        f"{number_text(mean)} requests waited on average, and {number_text(most)} at most, "
        f"{number_text(when)} s after the start."
    )
    return Chart(title, "seconds", "waiting requests", marks, sentence, height=180)


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
    columns = [name for name in _TIER_COLUMNS if name in _TIMES or any(row[name] for row in rows)][
        :_MOST_COLUMNS
    ]
    titles = [_TIMES.get(name, name) for name in columns]
    parts: list[Table | Chart] = [
        gantt_chart("Seats", spans, requests),
        Table("Tiers", titles, [[row[name] for name in columns] for row in rows]),
        _tier_depths(reader),
        Table(
            "All figures",
            [*(_TIMES.get(name, name.replace("_", " ")) for name in figures), *kinds],
            cells,
            note="held: sum over all requests, in seconds. Last columns: preemptions by what "
            "happened to the KV.",
            folded=True,
        ),
    ]
    title = f"semsched trace: {options['log']}" if "log" in options else "semsched trace"
    return Page(title, sentence, parts, options, python_and_versions("vllm"))


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
    sentence = ""
    if depths:
        most, when = max((sum(counts.values()), time) for time, counts in depths)
        sentence = f"At most {number_text(most)} requests waited, at {number_text(when)} s."
    return Chart("Queue depth", "seconds", "waiting requests", lines, sentence, note, height=180)
