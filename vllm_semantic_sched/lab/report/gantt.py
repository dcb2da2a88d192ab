"""Interactive Gantt chart of seats, for an HTML page."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vllm_semantic_sched.lab.report.content import (
    Boxes,
    Chart,
    Mark,
    Points,
    compared,
    level_title,
    number_text,
)
from vllm_semantic_sched.policy.record.spans import (
    HELD,
    RUNNING,
    SWAPPED,
    WAITING,
    Span,
    level_color,
    phases,
)

MOST_BARS = 1500
"""Times in a seat and holds in a chart: more of them make a page slow."""

_COLORS = {WAITING: "#c8c8c8", SWAPPED: "#6fb3d9", HELD: "#ffffff"}
_END_COLORS = {
    "finish": "black",
    "recompute": "#c0392b",
    "swap": "#2f7ebc",
    "partial": "#7d6aa8",
    "drop": "#e08e0b",
    "refused": "#e08e0b",
    "cancelled": "#27915b",
    "failed": "#ff3b30",
}
_OTHER_END_COLOR = "#8c8c8c"
_LAYERS = {WAITING: 0, SWAPPED: 0, RUNNING: 1, HELD: 2}  # order of drawing, lowest first
# Half of a bar's height, in rows.
_SEAT = 0.4
_WAIT = 0.08

_Box = tuple[float, float, float, float, str]


def gantt_chart(
    title: str,
    spans: Iterable[Span],
    requests: int,
    reference: tuple[str, Iterable[Span]] | None = None,
) -> Chart:
    """A row per request, in the order of `spans` (by time within each): a thin bar while it waits,
    a thick one of its level's color while it has a seat, pale while held, and a tick whose color
    says how the seat ended. The sentence says how long requests waited, compared with the spans of
    the reference, which has a name; the note how many of the run's requests `MOST_BARS` bars
    show."""
    spans = list(spans)
    by_request: defaultdict[tuple[int, int | str], list[Span]] = defaultdict(list)
    for span in spans:
        by_request[span.engine, span.request].append(span)
    rows: list[list[Span]] = []
    bars = 0
    for own in by_request.values():
        bars += len(own)
        if rows and bars > MOST_BARS:
            break
        rows.append(own[:MOST_BARS])
    first = f"Of the first {len(by_request)} requests, "
    note = "Click an entry of the legend to hide or show it; choose a tool to move or zoom."
    if len(rows) < requests:
        note += f" {len(rows)} of {requests} requests are shown (at most {MOST_BARS} bars)."
    height = min(800, 160 + 7 * len(rows))
    return Chart(
        title,
        x_label="seconds",
        y_label="request, in order of arrival",
        marks=_marks(rows),
        sentence=_sentence(spans, reference, "" if len(by_request) == requests else first),
        note=note,
        downwards=True,
        height=height,
    )


def _sentence(
    spans: Sequence[Span], reference: tuple[str, Iterable[Span]] | None, beginning: str
) -> str:
    """How long the most and the least urgent of these requests waited for their first seat."""
    waits = _median_waits(spans)
    name, others = reference or ("", ())
    before = _median_waits(others)
    texts = []
    for level in list(dict.fromkeys([min(waits), max(waits)])) if waits else []:
        text = f"half of level {level} had a seat within {number_text(waits[level])} s"
        if level in before:
            words = compared(waits[level], before[level], "less", "as long")
            text += f" ({name}: {number_text(before[level])} s"
            text += f"; {words})" if words else ")"
        texts.append(text)
    sentence = beginning + "; ".join(texts)
    return f"{sentence[0].upper()}{sentence[1:]}." if texts else ""


def _median_waits(spans: Iterable[Span]) -> dict[int, float]:
    """Seconds by level; of requests that had a seat."""
    waits: defaultdict[int, dict[tuple[int, int | str], float]] = defaultdict(dict)
    for span in spans:
        if span.end > span.start and span.end_kind != HELD:
            waits[span.level].setdefault((span.engine, span.request), span.start - span.arrival)
    return {level: statistics.median(own.values()) for level, own in waits.items()}


def _marks(rows: Sequence[Sequence[Span]]) -> list[Mark]:
    # By layer, level (of seats only), name and color.
    bars: defaultdict[tuple[int, int, str, str], list[_Box]] = defaultdict(list)
    ends: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
    arrivals: dict[int, tuple[float, int, str]] = {}
    for row, own_spans in enumerate(rows):
        for phase, start, end, span in phases(own_spans):
            head = f"request {span.request}, level {span.level}"
            arrivals[row] = (span.arrival, row, f"{head}: arrives at {span.arrival:.3f} s")
            if end > start:
                is_seat = phase == RUNNING
                level = span.level if is_seat else -1
                name = level_title(f"{span.level}") if is_seat else phase
                color = level_color(span.level) if is_seat else _COLORS[phase]
                text = f"{head}: {phase} from {start:.3f} to {end:.3f} s"
                layer = _LAYERS[phase]
                half = _SEAT if layer else _WAIT
                box = (start, end, row - half, row + half, text)
                bars[layer, level, name, color].append(box)
            if phase == RUNNING:
                ends[span.end_kind].append((end, row, f"{head}: {span.end_kind} at {end:.3f} s"))
    marks: list[Mark] = [
        Boxes(name, boxes, color, opacity=0.65 if name == HELD else 1.0)
        for (_, _, name, color), boxes in sorted(bars.items())
    ]
    for kind, ticks in ends.items():
        marks.append(Points(kind, ticks, _END_COLORS.get(kind, _OTHER_END_COLOR), "tick"))
    return [*marks, Points("arrival", [*arrivals.values()], "#555555")]
