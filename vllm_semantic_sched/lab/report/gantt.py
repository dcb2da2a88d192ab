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
    """A row per request, in the order of `spans`: a thin bar while it waits, a thick one of its
    level's color while it has a seat, pale while it is held, and a tick whose color says how the
    time in the seat ended. At most `MOST_BARS` bars; the note says what is left out.

    Args:
        spans: ordered by time within each request.
        requests: number of requests of the whole run.
    """
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
    bars: defaultdict[tuple[int, str], _Bars] = defaultdict(_Bars)
    ends: defaultdict[str, _Ticks] = defaultdict(_Ticks)
    arrivals: dict[int, tuple[float, str]] = {}
    for phase, start, end, span in phases(spans):
        row = rows[span.engine, span.request]
        head = f"request {span.request}, urgency {span.level}"
        arrivals[row] = span.arrival, f"{head}: arrives at {span.arrival:.3f} s"
        if end > start:
            name = f"urgency {span.level}" if phase == RUNNING else phase
            color = level_color(span.level) if phase == RUNNING else _COLORS[phase]
            text = f"{head}: {phase} from {start:.3f} to {end:.3f} s"
            bars[_LAYERS[phase], name].add(start, end, row, text, color)
        if phase == RUNNING:
            ends[span.end_kind].add(end, row, f"{head}: {span.end_kind} at {end:.3f} s")
    return [
        *(bars[layer, name].boxes(layer, name) for layer, name in sorted(bars)),
        *(ticks.points(kind) for kind, ticks in ends.items()),
        Points(
            "arrival",
            [time for time, _ in arrivals.values()],
            [*arrivals],
            "#555555",
            [text for _, text in arrivals.values()],
        ),
    ]


class _Bars:
    """Bars of one entry of the legend."""

    def __init__(self) -> None:
        self._bars: list[tuple[float, float, int, str]] = []
        self._color = ""

    def add(self, start: float, end: float, row: int, label: str, color: str) -> None:
        self._bars.append((start, end, row, label))
        self._color = color

    def boxes(self, layer: int, name: str) -> Boxes:
        half = _SEAT if layer else _WAIT
        starts, ends, rows, labels = zip(*self._bars, strict=True)
        return Boxes(
            name,
            starts,
            ends,
            [row - half for row in rows],
            [row + half for row in rows],
            self._color,
            labels,
            opacity=0.65 if name == HELD else 1.0,
        )


class _Ticks:
    """Ends of one kind."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, str]] = []

    def add(self, time: float, row: int, label: str) -> None:
        self._ends.append((time, row, label))

    def points(self, kind: str) -> Points:
        times, rows, labels = zip(*self._ends, strict=True)
        color = END_COLORS.get(kind, OTHER_END_COLOR)
        return Points(kind, times, rows, color, labels, marker="tick")
