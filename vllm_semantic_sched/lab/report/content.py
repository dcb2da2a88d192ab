"""What a page shows, as plain data: tables and charts with their marks."""

import itertools
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import Literal, Self

SERIES_COLORS = ("#2f7ebc", "#d98032", "#1b9e77", "#c03030", "#9467bd", "#8c564b", "#e377c2")

SAME = 0.05
"""Ratios closer to 1 than this are called about the same."""

LOGARITHMIC = "The vertical axis is logarithmic."
"""Part of the notes of such charts."""

_GROUP_WIDTH = 0.84  # of the distance between two groups of bars
_RANGE_WIDTH = 0.02
_DECADE = 10.0
_MOST_NAMES = 6  # in a sentence

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
    marker: Literal["dot", "disc", "tick"] = "dot"


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
    """Marks over two axes; x may have texts as ticks in place of numbers. `sentence` says what to
    see. A logarithmic y shows positive values only; `downwards`: y grows downwards; `height` is in
    pixels, between the axes. `x_range`, `y_range`: the ends of the axes, if not those of the
    marks. `half`: takes half of a wide page's width, so that two charts are beside each other."""

    title: str
    x_label: str
    y_label: str
    marks: Sequence[Mark]
    sentence: str = ""
    note: str = ""
    x_ticks: Mapping[float, str] = field(default_factory=dict)
    log_y: bool = False
    downwards: bool = False
    height: int = 260
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    half: bool = False


@dataclass(frozen=True)
class Page:
    """`title` says which command compared what; `sentence` (a paragraph per line) what was done.
    Then come `parts` in their order, without those that have nothing to show; the configuration
    (nested keys and values) as YAML; and versions of programs, and of the hardware if it
    matters."""

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


def has_data(part: Table | Chart | Mark) -> bool:
    """Whether there is anything to see."""
    if isinstance(part, Table):
        return bool(part.rows)
    if isinstance(part, Chart):
        return any(map(has_data, part.marks))
    if isinstance(part, Line):
        return not all(map(math.isnan, part.y))
    return bool(part.points if isinstance(part, Points) else part.boxes)


def is_logarithmic(values: Iterable[float]) -> bool:
    """Whether an axis for these values (NaN: none) should be: they span more than a decade, and
    none is 0, which a logarithmic axis cannot show."""
    known = [value for value in values if not math.isnan(value)]
    return bool(known) and min(known) > 0 and max(known) > _DECADE * min(known)


def grouped_values(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    ranges: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
    lines: Sequence[Line] = (),
    sentence: str = "",
    note: str = "",
) -> Chart:
    """A chart with a group per name in `groups`, and in each group a value per series (NaN leaves
    the place empty), with a thin line from the lowest to the highest value of its range, if there
    are ranges; and `lines` over them. The values are bars from 0, or dots if the axis is
    logarithmic: there, a bar has no foot."""
    heights_and_ends = itertools.chain(
        *series.values(),
        *itertools.chain(*ranges.values()),
        *(line.y for line in lines),
    )
    log = is_logarithmic(heights_and_ends)
    width = _GROUP_WIDTH / max(1, len(series))
    marks: list[Mark] = []
    for place, (name, heights) in enumerate(series.items()):
        bars = []
        dots = []
        thin = []
        for group, height in enumerate(heights):
            if math.isnan(height):
                continue
            left = group - _GROUP_WIDTH / 2 + place * width
            middle = left + width / 2
            label = f"{name}, {groups[group]}: {number_text(height)}"
            bars.append((left, left + width, 0.0, height, label))
            dots.append((middle, height, label))
            low, high = ranges[name][group] if ranges else (math.nan, math.nan)
            if low < high:
                half = _RANGE_WIDTH / 2
                label = f"{name}, {groups[group]}: {number_text(low)} to {number_text(high)}"
                thin.append((middle - half, middle + half, low, high, label))
        if log:
            marks += [Boxes(name, thin, colors[name]), Points(name, dots, colors[name], "disc")]
        else:
            marks += [Boxes(name, bars, colors[name]), Boxes("range", thin, "#333333")]
    if log:
        note = f"{note} {LOGARITHMIC}".strip()
    ticks = {float(place): name for place, name in enumerate(groups)}
    return Chart(
        title,
        x_label="",
        y_label=y_label,
        marks=[*marks, *lines],
        sentence=sentence,
        note=note,
        x_ticks=ticks,
        log_y=log,
    )


def groups_text(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], reference: str | None
) -> str:
    """The values of the most and the least urgent level (the last group is all levels), and their
    ratios to those of the reference, which names one of the series."""
    known = reference is not None and reference in series
    bases = series[reference] if reference is not None and known else [math.nan] * len(groups)
    ends = dict.fromkeys([0, max(0, len(groups) - 2)])
    sentences = []
    for place in ends:
        texts = []
        for name, values in series.items():
            text = f"{name} {number_text(values[place])}"
            words = compared(values[place], bases[place], "lower", "as high")
            texts.append(f"{text} ({words})" if words and name != reference else text)
        sentences.append(f"{groups[place].capitalize()}: {', '.join(texts)}.")
    if known and len(series) > 1:
        sentences.append(f"In brackets: compared with {reference}.")
    return " ".join(sentences)


def beside(charts: Sequence[Chart]) -> list[Chart]:
    """The charts at half of the page's width and at the same scale, that of their `Boxes`."""
    boxes = [
        box
        for chart in charts
        for mark in chart.marks
        if isinstance(mark, Boxes)
        for box in mark.boxes
    ]
    if len(charts) < 2 or not boxes:
        return list(charts)
    margin = 0.02 * max(box[1] for box in boxes)
    x_range = min(box[0] for box in boxes) - margin, max(box[1] for box in boxes) + margin
    y_range = min(box[2] for box in boxes), 1.02 * max(box[3] for box in boxes)
    height = max(chart.height for chart in charts)
    return [
        replace(chart, x_range=x_range, y_range=y_range, height=height, half=True)
        for chart in charts
    ]


def compared(value: float, reference: float, less: str, more: str) -> str:
    """How many times a value is `less` than the reference, or is `more` ("as high"); may be
    empty, if either is 0 or NaN."""
    if not (value > 0 and reference > 0):
        return ""
    factor = value / reference
    if abs(factor - 1) < SAME:
        return "about the same"
    if factor < 1:
        return f"{short_text(1 / factor)} times {less}"
    return f"{short_text(factor)} times {more}"


def short_text(value: float) -> str:
    """Two digits or all whole ones, never with an exponent."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"


def names_text(names: Iterable[str]) -> str:
    """Names as a list in a sentence, or how many there are if they are many."""
    known = list(dict.fromkeys(names))
    if len(known) > _MOST_NAMES:
        return f"{len(known)} schedulers"
    *others, last = known
    return f"{', '.join(others)} and {last}" if others else last


def series_colors(names: Sequence[str]) -> dict[str, str]:
    """A color of `SERIES_COLORS` for each name, in turn."""
    return dict(zip(names, itertools.cycle(SERIES_COLORS), strict=False))


def level_title(level: str) -> str:
    """The name of a row of metrics: a level, or all of them."""
    return "all levels" if level == "all" else f"level {level}"


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
