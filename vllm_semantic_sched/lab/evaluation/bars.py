"""Bars that the figures of a report must reach, so that nobody ships a worse predictor unnoticed.

A file of bars, by the name of the test set and the figure's place in its report.json:

    urgency:
      at_least:
        accuracy: 0.85
        recall.0: 0.95
        groups.language.*.recall_of_0: 0.8
      at_most:
        ece: 0.05

A star stands for every key. Figures that the texts of a group do not define are passed over there.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_SIDES = ("at_least", "at_most")

Bars = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By test set, `at_least` or `at_most`, and figure."""


def read_bars(path: Path) -> Bars:
    """Read a file of bars.

    Raises:
        ValueError: it is not as described above; names the place and what is valid.
    """
    try:
        bars = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    for name, sides in _entries(bars, f"{path}", "test sets"):
        for side, figures in _entries(sides, f"{path}, {name}", " or ".join(_SIDES)):
            if side not in _SIDES:
                raise ValueError(f"{path}, {name}: {side!r} is not {' or '.join(_SIDES)}")
            for figure, bar in _entries(figures, f"{path}, {name}.{side}", "figures"):
                if isinstance(bar, bool) or not isinstance(bar, int | float):
                    raise ValueError(f"{path}, {name}.{side}.{figure}: {bar!r} is not a number")
    return bars  # type: ignore[no-any-return]  # checked above


def bars_missed(bars: Bars, reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each figure that misses its bar.

    Raises:
        ValueError: a bar is about a test set or a figure that there is not.
    """
    lines = []
    for name, sides in bars.items():
        if name not in reports:
            raise ValueError(f"bars for {name}, which is not measured; measured: {[*reports]}")
        for side, figures in sides.items():
            for figure, bar in figures.items():
                found = list(_found(reports[name], figure))
                if all(value is None for _, value in found):
                    raise ValueError(f"bars for {name}: there is no figure {figure}")
                lines += [
                    f"{name}: {place} is {value:.3f}, {side.replace('_', ' ')} {bar:g} is demanded"
                    for place, value in found
                    if value is not None and not _reached(value, bar, side)
                ]
    return lines


def _reached(value: float, bar: float, side: str) -> bool:
    # A share such as 0.8 may come out of a division a rounding below it.
    close = math.isclose(value, bar, rel_tol=1e-9)
    return close or (value > bar if side == "at_least" else value < bar)


def _found(report: Any, figure: str, place: str = "") -> Iterator[tuple[str, float | None]]:
    """The figures at a path with stars, each with its path; None for one that is not defined."""
    if not figure:
        if report is None or isinstance(report, int | float):
            yield place, report
        return
    key, _, rest = figure.partition(".")
    for name, value in _items(report):
        if key in (name, "*"):
            yield from _found(value, rest, f"{place}.{name}".lstrip("."))


def _items(report: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(report, Mapping):
        yield from report.items()
    elif isinstance(report, list):
        yield from ((str(at), value) for at, value in enumerate(report))


def _entries(node: Any, where: str, wanted: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or not node:
        raise ValueError(f"{where}: a mapping of {wanted} is needed, not {node!r}")
    yield from node.items()
