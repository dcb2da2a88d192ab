"""Interactive Gantt chart of seats, for an HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from vllm_semantic_sched.lab.report.content import Boxes, Chart, Mark, Points
from vllm_semantic_sched.sim.spans import (
    END_COLORS,
    HELD,
    OTHER_END_COLOR,
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
_LAYERS = {WAITING: 0, SWAPPED: 0, RUNNING: 1, HELD: 2}  # order of drawing, lowest first
_SEAT, _WAIT = 0.4, 0.08  # half of a bar's height, in rows

_Key = tuple[int, int | str]  # engine and request
_Box = tuple[float, float, float, float, str]


def gantt_chart(title: str, spans: Iterable[Span], requests: int) -> Chart:
    """A row per request, in the order of `spans` (by time within each request): a thin bar while it
    waits, a thick one of its level's color while it has a seat, pale while it is held, and a tick
    whose color says how the time in the seat ended. At most `MOST_BARS` bars; the note says how
    many of the run's requests are shown."""
    by_request: defaultdict[_Key, list[Span]] = defaultdict(list)
    for span in spans:
        by_request[span.engine, span.request].append(span)
    rows: dict[_Key, int] = {}
    shown: list[Span] = []
    for key, own in by_request.items():
        if rows and len(shown) + len(own) > MOST_BARS:
            break
        rows[key] = len(rows)
        shown += own[:MOST_BARS]
    note = "Click an entry of the legend to hide or show it; drag to move, choose a tool to zoom."
    if len(rows) < requests:
        note += f" {len(rows)} of {requests} requests are shown (at most {MOST_BARS} bars)."
    height = min(900, 260 + 7 * len(rows))
    labels = title, "seconds", "request, in order of arrival"
    return Chart(*labels, _marks(shown, rows), note=note, downwards=True, height=height)


def _marks(spans: Sequence[Span], rows: Mapping[_Key, int]) -> list[Mark]:
    bars: defaultdict[tuple[int, str, str], list[_Box]] = defaultdict(list)
    ends: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
    arrivals: dict[int, tuple[float, int, str]] = {}
    for phase, start, end, span in phases(spans):
        row = rows[span.engine, span.request]
        head = f"request {span.request}, urgency {span.level}"
        arrivals[row] = span.arrival, row, f"{head}: arrives at {span.arrival:.3f} s"
        if end > start:
            name = f"urgency {span.level}" if phase == RUNNING else phase
            color = level_color(span.level) if phase == RUNNING else _COLORS[phase]
            text = f"{head}: {phase} from {start:.3f} to {end:.3f} s"
            half = _SEAT if _LAYERS[phase] else _WAIT
            bars[_LAYERS[phase], name, color].append((start, end, row - half, row + half, text))
        if phase == RUNNING:
            ends[span.end_kind].append((end, row, f"{head}: {span.end_kind} at {end:.3f} s"))
    marks: list[Mark] = [
        Boxes(name, bars[layer, name, color], color, opacity=0.65 if name == HELD else 1.0)
        for layer, name, color in sorted(bars)
    ]
    for kind, ticks in ends.items():
        marks.append(Points(kind, ticks, END_COLORS.get(kind, OTHER_END_COLOR), "tick"))
    return [*marks, Points("arrival", [*arrivals.values()], "#555555")]
