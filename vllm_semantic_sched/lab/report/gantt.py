"""Interactive Gantt chart of seats, for an HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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


def gantt_chart(title: str, spans: Iterable[Span], requests: int) -> Chart:
    """A row per request, in the order of `spans` (by time within each request): a thin bar while it
    waits, a thick one of its level's color while it has a seat, pale while it is held, and a tick
    whose color says how the time in the seat ended. At most `MOST_BARS` bars; the note says how
    many of the run's requests are shown."""
    by_request: defaultdict[tuple[int, int | str], list[Span]] = defaultdict(list)
    for span in spans:
        by_request[span.engine, span.request].append(span)
    rows: dict[tuple[int, int | str], int] = {}
    shown: list[Span] = []
    for key, own in by_request.items():
        if rows and len(shown) + len(own) > MOST_BARS:
            break
        rows[key] = len(rows)
        shown += own[:MOST_BARS]
    note = "Click an entry of the legend to hide or show it; drag to move, choose a tool to zoom."
    if len(rows) < requests:
        note += f" {len(rows)} of {requests} requests are shown (at most {MOST_BARS} bars)."
    return Chart(
        title,
        "seconds",
        "request, in order of arrival",
        _marks(shown, rows),
        note=note,
        downwards=True,
        height=min(900, 260 + 7 * len(rows)),
    )


def _marks(spans: Sequence[Span], rows: dict[tuple[int, int | str], int]) -> list[Mark]:
    bars: defaultdict[tuple[int, str, str], list[tuple[float, float, int, str]]] = defaultdict(list)
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
            bars[_LAYERS[phase], name, color].append((start, end, row, text))
        if phase == RUNNING:
            ends[span.end_kind].append((end, row, f"{head}: {span.end_kind} at {end:.3f} s"))
    return [
        *(_boxes(*entry, bars[entry]) for entry in sorted(bars)),
        *(
            Points(kind, ticks, END_COLORS.get(kind, OTHER_END_COLOR), "tick")
            for kind, ticks in ends.items()
        ),
        Points("arrival", [*arrivals.values()], "#555555"),
    ]


def _boxes(
    layer: int, name: str, color: str, bars: Iterable[tuple[float, float, int, str]]
) -> Boxes:
    half = _SEAT if layer else _WAIT
    boxes = [(start, end, row - half, row + half, label) for start, end, row, label in bars]
    return Boxes(name, boxes, color, opacity=0.65 if name == HELD else 1.0)
