"""What a page shows, as plain data: tables and charts with their marks."""

import itertools
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal, Self

SERIES_COLORS = ("#2f7ebc", "#d98032", "#1b9e77", "#c03030", "#9467bd", "#8c564b", "#e377c2")

_GROUP_WIDTH = 0.84  # of the distance between two groups of bars

Cell = str | float | None


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words; None and NaN are a dash. A click opens a `folded` table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    folded: bool = False

    @classmethod
    def of(
        cls, title: str, rows: Sequence[Mapping[str, Cell]], note: str = "", folded: bool = False
    ) -> Self:
        """A table from at least one row, given as cells by column."""
        return cls(title, list(rows[0]), [list(row.values()) for row in rows], note, folded)


@dataclass(frozen=True)
class Line:
    """A line through points. With `steps`, a value holds until the next one."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Points:
    """Single points: x, y, and the text that is shown under the pointer."""

    name: str
    points: Sequence[tuple[float, float, str]]
    color: str
    marker: Literal["dot", "tick"] = "dot"


@dataclass(frozen=True)
class Boxes:
    """Rectangles: left, right, bottom, top, and the text that is shown under the pointer."""

    name: str
    boxes: Sequence[tuple[float, float, float, float, str]]
    color: str
    opacity: float = 1.0


Mark = Line | Points | Boxes


@dataclass(frozen=True)
class Chart:
    """Marks over two axes; x may have texts as ticks in place of numbers. A logarithmic y shows
    positive values only; `downwards`: y grows downwards; `height` is in pixels."""

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    note: str = ""
    x_ticks: Mapping[float, str] = field(default_factory=dict)
    log_y: bool = False
    downwards: bool = False
    height: int = 340


@dataclass(frozen=True)
class Page:
    """`sentence` says what was done; then come `parts` in their order, the configuration (nested
    keys and values) as YAML, and versions of programs, and of the hardware if it matters."""

    title: str
    sentence: str
    parts: Sequence[Table | Chart]
    configuration: Mapping[str, object]
    versions: Mapping[str, object]


def installed_versions(*names: str) -> dict[str, str]:
    """Versions of this package and of those distributions that are installed."""
    versions = {}
    for name in (*names, "vllm-semantic-sched"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def python_and_versions(*names: str) -> dict[str, object]:
    """Versions of Python, of this package and of those distributions that are installed."""
    return {"python": platform.python_version(), **installed_versions(*names)}


def grouped_bars(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    log: bool = True,
    lines: Sequence[Line] = (),
) -> Chart:
    """A chart with a group of bars per name in `groups`, and in each group a bar per series (a
    value per group; NaN leaves the place empty), and lines over them. On a logarithmic axis only
    positive values have a bar."""
    positive = [value for heights in series.values() for value in heights if value > 0]
    # A bar on a logarithmic axis has no natural foot: let it start below the smallest value.
    shown = itertools.chain(positive, *(line.y for line in lines))
    foot = min(shown) / 2 if log and positive else 0.0
    width = _GROUP_WIDTH / max(1, len(series))
    marks = []
    for place, (name, heights) in enumerate(series.items()):
        bars = []
        for group, height in enumerate(heights):
            if height > 0 or not (log or math.isnan(height)):
                left = group - _GROUP_WIDTH / 2 + place * width
                label = f"{name}, {groups[group]}: {number_text(height)}"
                bars.append((left, left + width, foot, height, label))
        marks.append(Boxes(name, bars, colors[name]))
    ticks = {float(place): name for place, name in enumerate(groups)}
    return Chart(title, "", y_label, [*marks, *lines], x_ticks=ticks, log_y=log and bool(positive))


def series_colors(names: Sequence[str]) -> dict[str, str]:
    """A color of `SERIES_COLORS` for each name, in turn."""
    return dict(zip(names, itertools.cycle(SERIES_COLORS), strict=False))


def level_title(level: str) -> str:
    """The name of a row of metrics: an urgency level, or all of them."""
    return level if level == "all" else f"urgency {level}"


def number_text(value: float | None) -> str:
    """About three digits; integers in full; a dash for a missing value (None, NaN)."""
    if value is None or math.isnan(value):
        return "-"
    if value == round(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def is_word(cell: Cell) -> bool:
    """Whether a cell is neither a number nor the sign for a missing one."""
    if not isinstance(cell, str):
        return False
    try:
        float(cell)
    except ValueError:
        return cell != "-"
    return False
