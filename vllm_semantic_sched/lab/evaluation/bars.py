"""Bars that the figures of a report must reach, so that nobody ships a worse predictor unnoticed.

A file of bars, by the name of the test set and the figure's place in its report.json; a star stands
for every key, and passes over groups whose texts do not define the figure:

    urgency:
      at_least:
        accuracy: 0.85
        recall.0: 0.95
        groups.language.*.recall_of_0: 0.8
      at_most:
        ece: 0.05
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from vllm_semantic_sched.policy.config.section import PolicyError, Section, parse_section


class SetBars(Section):
    """The bars of one test set, by the figure's place."""

    at_least: dict[str, float] = Field({}, description="Least values.")
    at_most: dict[str, float] = Field({}, description="Greatest values.")


def read_bars(path: Path) -> dict[str, SetBars]:
    """Read a file of bars, by test set. ValueError if it is not as described above; names the place
    and what is valid."""
    try:
        bars = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from error
    if not isinstance(bars, dict):
        raise PolicyError(f"{path}: expected a mapping of test sets, got {bars!r}")
    return {name: parse_section(SetBars, sides, f"{path}, {name}") for name, sides in bars.items()}


def bars_missed(bars: Mapping[str, SetBars], reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line for each figure that misses its bar. ValueError for a bar about a test set or a
    figure that does not exist."""
    lines = []
    for name, sides in bars.items():
        if name not in reports:
            raise ValueError(f"bars for {name}, which is not measured; measured: {[*reports]}")
        for side, side_bars in sides:
            for figure, bar in side_bars.items():
                figures = dict(_figures_at(reports[name], figure))
                values = {place: value for place, value in figures.items() if value is not None}
                if not values:
                    raise ValueError(f"bars for {name}: there is no figure {figure}")
                demanded = f"{side.replace('_', ' ')} {bar:g} is demanded"
                lines += [
                    f"{name}: {place} is {value:.3f}, {demanded}"
                    for place, value in values.items()
                    if not _reached(value, bar, side)
                ]
    return lines


def _reached(value: float, bar: float, side: str) -> bool:
    # A share such as 0.8 may come out of a division a rounding below it.
    if math.isclose(value, bar, rel_tol=1e-9):
        return True
    return value > bar if side == "at_least" else value < bar


def _figures_at(report: Any, figure: str, place: str = "") -> Iterator[tuple[str, float | None]]:
    """The figures at a path with stars, each with its path; None for an undefined one."""
    if not figure:
        if report is None or isinstance(report, int | float):
            yield place, report
        return
    key, _, rest = figure.partition(".")
    if isinstance(report, list):
        report = {str(index): value for index, value in enumerate(report)}
    if not isinstance(report, Mapping):
        return
    for name, value in report.items():
        if key in (name, "*"):
            yield from _figures_at(value, rest, f"{place}.{name}".lstrip("."))
