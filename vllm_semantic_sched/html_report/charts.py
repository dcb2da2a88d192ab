"""Charts drawn with Bokeh, as the JSON from which its script draws them in the browser."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.models import FixedTicker, HoverTool, Legend
from bokeh.plotting import figure
from bokeh.resources import Resources

from vllm_semantic_sched.html_report.content import Boxes, Chart, Line, Mark, Points

_TOOLS = "pan,box_zoom,xwheel_zoom,reset,save"


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
    for axis, ticks in ((plot.xaxis[0], chart.x_ticks), (plot.yaxis[0], chart.y_ticks)):
        if ticks:
            axis.ticker = FixedTicker(ticks=[*ticks])
            axis.major_label_overrides = {**ticks}
    legend = []
    for mark in chart.marks:
        renderer = _draw(plot, mark)
        tooltip = [("", "@label")] if not isinstance(mark, Line) else [(mark.name, "@x: @y")]
        plot.add_tools(HoverTool(renderers=[renderer], tooltips=tooltip, visible=False))
        legend.append((mark.name, [renderer]))
    plot.add_layout(Legend(items=legend, click_policy="hide", label_text_font_size="9pt"), "right")
    item: dict[str, Any] = json.loads(json.dumps(json_item(plot, element)))
    return item


def _draw(plot: figure, mark: Mark) -> Any:
    if isinstance(mark, Line):
        style = {"color": mark.color, "line_dash": "dashed" if mark.dashed else "solid"}
        if mark.steps:
            return plot.step([*mark.x], [*mark.y], mode="after", line_width=2, **style)
        return plot.line([*mark.x], [*mark.y], line_width=2, **style)
    source: dict[str, Sequence[object]] = {"label": [*mark.labels]}
    if isinstance(mark, Points):
        source |= {"x": [*mark.x], "y": [*mark.y]}
        shape: dict[str, Any] = (
            {"marker": "dash", "angle": 1.5708, "size": 10, "line_width": 2}
            if mark.marker == "tick"
            else {"marker": "circle", "size": 4}
        )
        return plot.scatter("x", "y", source=_source(source), color=mark.color, **shape)
    assert isinstance(mark, Boxes)
    source |= {side: [*getattr(mark, side)] for side in ("left", "right", "bottom", "top")}
    color: str = mark.color if isinstance(mark.color, str) else "color"
    if not isinstance(mark.color, str):
        source["color"] = [*mark.color]
    return plot.quad(
        left="left",
        right="right",
        bottom="bottom",
        top="top",
        source=_source(source),
        color=color,
        fill_alpha=mark.opacity,
        # Pale boxes would be invisible in the legend.
        line_color="#bbbbbb" if mark.opacity < 1 else None,
    )


def _source(columns: dict[str, Sequence[object]]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(columns)
