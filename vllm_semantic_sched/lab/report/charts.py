"""Charts drawn with Bokeh, as the JSON from which its script draws them in the browser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    Legend,
    LogTicker,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from vllm_semantic_sched.lab.report.content import Boxes, Chart, Line, Mark, Points

_TOOLS = "pan,box_zoom,xwheel_zoom,reset,save"
_DIGITS = 8  # of a coordinate; more make the page larger and no chart better
_DECADES = range(-9, 13)


def script() -> str:
    """Bokeh's own script, without which no chart is drawn."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def chart_json(chart: Chart, element: str) -> dict[str, Any]:
    """The chart, to be drawn into the HTML element with this id."""
    plot = figure(
        height=chart.height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        x_axis_label=chart.x_label,
        y_axis_label=chart.y_label,
        x_axis_type="log" if chart.log_x else "linear",
        y_axis_type="log" if chart.log_y else "linear",
    )
    plot.toolbar.logo = None
    plot.y_range.flipped = chart.downwards
    legend = []
    values: dict[str, list[float]] = {"x": [], "y": []}
    for mark in chart.marks:
        columns = _columns(mark)
        renderer = _draw(plot, mark, columns)
        tooltip = (mark.name, "@x: @y") if isinstance(mark, Line) else ("", "@label")
        plot.add_tools(HoverTool(renderers=[renderer], tooltips=[tooltip], visible=False))
        legend.append((mark.name, [renderer]))
        values["x"] += [*columns.get("x", ()), *columns.get("left", ()), *columns.get("right", ())]
        values["y"] += [*columns.get("y", ()), *columns.get("bottom", ()), *columns.get("top", ())]
    plot.add_layout(Legend(items=legend, click_policy="hide", label_text_font_size="9pt"), "right")
    _set_ticks(plot.xaxis[0], chart.x_ticks, chart.log_x, values["x"])
    _set_ticks(plot.yaxis[0], chart.y_ticks, chart.log_y, values["y"])
    item: dict[str, Any] = json_item(plot, element)
    return item


def _set_ticks(axis: Any, ticks: Mapping[float, str], log: bool, values: Iterable[float]) -> None:
    if ticks:
        axis.ticker = FixedTicker(ticks=[*ticks])
        axis.major_label_overrides = {**ticks}
    elif log:
        positive = [value for value in values if value > 0]
        wide = positive and max(positive) > 10 * min(positive)
        # Bokeh's own ticks leave most of an axis of one to two decades without a label.
        all_decades = [mantissa * 10.0**power for power in _DECADES for mantissa in (1, 2, 5)]
        axis.ticker = FixedTicker(ticks=all_decades) if wide else LogTicker()
        axis.formatter = BasicTickFormatter(use_scientific=False)


def _columns(mark: Mark) -> dict[str, list[Any]]:
    """What Bokeh draws the mark from."""
    if isinstance(mark, Line):
        return {"x": _short(mark.x), "y": _short(mark.y)}
    rows: Sequence[Sequence[Any]] = mark.boxes if isinstance(mark, Boxes) else mark.points
    names = ("left", "right", "bottom", "top") if isinstance(mark, Boxes) else ("x", "y")
    columns = {name: _short(row[place] for row in rows) for place, name in enumerate(names)}
    columns["label"] = [row[-1] for row in rows]
    if isinstance(mark, Boxes) and not isinstance(mark.color, str):
        columns["color"] = [*mark.color]
    return columns


def _short(values: Iterable[float]) -> list[Any]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def _draw(plot: figure, mark: Mark, columns: Mapping[str, Sequence[Any]]) -> Any:
    source = ColumnDataSource({**columns})
    if isinstance(mark, Line):
        style: dict[str, Any] = {"line_color": mark.color, "line_width": 2}
        style["line_dash"] = "dashed" if mark.dashed else "solid"
        if mark.steps:
            return plot.step("x", "y", source=source, mode="after", **style)
        return plot.line("x", "y", source=source, **style)
    if isinstance(mark, Points):
        shape: dict[str, Any] = {"marker": "circle", "size": 4}
        if mark.marker == "tick":
            shape = {"marker": "dash", "angle": math.pi / 2, "size": 8, "line_width": 2}
        return plot.scatter("x", "y", source=source, color=mark.color, **shape)
    return plot.quad(
        **{side: side for side in ("left", "right", "bottom", "top")},
        source=source,
        fill_color=mark.color if isinstance(mark.color, str) else "color",
        fill_alpha=mark.opacity,
        # Pale boxes would be invisible in the legend.
        line_color="#bbbbbb" if mark.opacity < 1 else None,
    )
