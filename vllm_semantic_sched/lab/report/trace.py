"""The HTML page of an event log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_semantic_sched.lab.report.content import (
    Chart,
    Line,
    Page,
    Table,
    python_and_versions,
    series_colors,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.operate.event_log import LogReader
from vllm_semantic_sched.sim.spans import Span

_MOST_POINTS = 2000  # of a line


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
    preemptions = {kind: None for row in rows for kind in row["preemptions"]}
    figures = [name for name in rows[0] if name != "preemptions"]
    table = Table(
        "Tiers",
        [*(name.replace("_", " ") for name in figures), *preemptions],
        [
            [*(row[name] for name in figures), *(row["preemptions"].get(k, 0) for k in preemptions)]
            for row in rows
        ],
        note="Times in seconds; held: sum over all requests. Last columns: preemptions by what "
        "happened to the KV.",
    )
    parts = table, gantt_chart("Seats", spans, requests), _depth_chart(reader)
    return Page("Event log", sentence, parts, options, python_and_versions("vllm"))


def _depth_chart(reader: LogReader) -> Chart:
    """Waiting requests per tier."""
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
