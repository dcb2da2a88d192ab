"""Charts drawn with Bokeh, as the JSON from which its script draws them in the browser."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
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

from vllm_semantic_sched.lab.report.content import Chart, Line, Mark, Points, has_data

_TOOLS = "pan,box_zoom,xwheel_zoom,reset,save"
_LEGEND_COLUMNS = 3  # fit a phone
_DIGITS = 8  # of a coordinate; more make the page larger and no chart better
_ALL_DECADES = [mantissa * 10.0**power for power in range(-9, 13) for mantissa in (1, 2, 5)]


def script() -> str:
    """Bokeh's own script, without which no chart is drawn."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def chart_json(chart: Chart, element: str) -> dict[str, Any]:
    """The chart, to be drawn into the HTML element with this id."""
    plot = figure(
        frame_height=chart.height,
        sizing_mode="stretch_width",
        tools=_TOOLS,
        toolbar_location="above",
        x_axis_label=chart.x_label,
        y_axis_label=chart.y_label,
        y_axis_type="log" if chart.log_y else "linear",
    )
    plot.toolbar.logo = None
    # Dragging must scroll the page, above all on a phone, until a tool is chosen.
    plot.toolbar.active_drag = None
    for shown, ends in ((plot.x_range, chart.x_range), (plot.y_range, chart.y_range)):
        if ends is not None:
            shown.start, shown.end = ends
    plot.y_range.flipped = chart.downwards
    if chart.downwards and chart.y_range is not None:
        plot.y_range.end, plot.y_range.start = chart.y_range
    legend: dict[str, list[Any]] = {}
    heights: list[float] = []
    for mark in filter(has_data, chart.marks):
        renderer = _draw(plot, mark)
        tooltip = (mark.name, "@x: @y") if isinstance(mark, Line) else ("", "@label")
        plot.add_tools(HoverTool(renderers=[renderer], tooltips=[tooltip], visible=False))
        legend.setdefault(mark.name, []).append(renderer)
        for name in ("y", "bottom", "top"):
            heights += renderer.data_source.data.get(name, ())
    entries = Legend(
        items=[*legend.items()],
        click_policy="hide",
        label_text_font_size="9pt",
        orientation="horizontal",
        ncols=_LEGEND_COLUMNS,
    )
    plot.add_layout(entries, "below")
    if chart.x_ticks:
        plot.xaxis[0].ticker = FixedTicker(ticks=[*chart.x_ticks])
        plot.xaxis[0].major_label_overrides = {**chart.x_ticks}
    if chart.log_y:
        positive = [value for value in heights if value > 0]
        wide = positive and max(positive) > 10 * min(positive)
        # Bokeh's own ticks leave most of an axis of one to two decades without a label.
        plot.yaxis[0].ticker = FixedTicker(ticks=_ALL_DECADES) if wide else LogTicker()
        plot.yaxis[0].formatter = BasicTickFormatter(use_scientific=False)
    item: dict[str, Any] = json_item(plot, element)
    return item


def _source(rows: Iterable[Sequence[float | str]], *columns: str) -> ColumnDataSource:
    data: dict[str, list[float | str]] = {column: [] for column in columns}
    for row in rows:
        for column, value in zip(columns, row, strict=True):
            shown = value if isinstance(value, str) else float(f"{value:.{_DIGITS}g}")
            data[column].append(shown)
    return ColumnDataSource(data)


def _draw(plot: figure, mark: Mark) -> Any:
    """Draw a mark; its renderer."""
    if isinstance(mark, Line):
        style: dict[str, Any] = {"line_color": mark.color, "line_width": 2}
        style["line_dash"] = "dashed" if mark.dashed else "solid"
        style["source"] = _source(zip(mark.x, mark.y, strict=True), "x", "y")
        draw = partial(plot.step, mode="after") if mark.steps else plot.line
        return draw("x", "y", **style)
    if isinstance(mark, Points):
        size = 11 if mark.marker == "disc" else 4
        shape: dict[str, Any] = {"marker": "circle", "size": size}
        if mark.marker == "tick":
            shape = {"marker": "dash", "angle": math.pi / 2, "size": 8, "line_width": 2}
        source = _source(mark.points, "x", "y", "label")
        return plot.scatter("x", "y", source=source, color=mark.color, **shape)
    sides = ("left", "right", "bottom", "top")
    return plot.quad(
        **dict(zip(sides, sides, strict=True)),
        source=_source(mark.boxes, *sides, "label"),
        fill_color=mark.color,
        fill_alpha=mark.opacity,
        # Pale boxes would be invisible in the legend.
        line_color="#bbbbbb" if mark.opacity < 1 else None,
    )
