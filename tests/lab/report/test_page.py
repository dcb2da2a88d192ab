"""The page is well formed, loads nothing, and has the tables and the data of the charts."""

import math
import re

import pytest
from html_pages import VOID, read_page

from vllm_semantic_sched.lab.report.content import (
    Boxes,
    Chart,
    Line,
    Page,
    Points,
    Table,
    beside,
    compared,
    grouped_values,
    groups_text,
    number_text,
    python_and_versions,
)
from vllm_semantic_sched.lab.report.page import write_page

ATTACK = '</script><img src="http://example.org/x.png"> & "quotes"'
TABLE = Table("Waiting", ["scheduler", "s"], [[ATTACK, 12.3456], ["ours", None]], note=ATTACK)
CHART = Chart(
    "Marks",
    "seconds",
    "requests",
    [
        Line("line", [0.0, 1.0], [2.0, math.nan], "#ff0000"),
        Points("points", [(0.5, 1.25, ATTACK)], "#00ff00"),
        Boxes("boxes", [(0.0, 0.75, 0.0, 1.0, "a box")], "#0000ff"),
    ],
    x_ticks={1.0: "one"},
)


@pytest.fixture
def page(tmp_path):
    content = Page(
        ATTACK, "What was done.", [TABLE, CHART], {"seats": {"most": 7}}, python_and_versions()
    )
    return write_page(content, tmp_path)


def test_nothing_is_loaded(page):
    parsed = read_page(page)
    # Namespaces and messages in Bokeh's script name addresses; only these could load something.
    loading = {"src", "href", "srcset", "data", "action", "poster"}
    assert not [one for one in parsed.attributes if one[1] in loading]
    assert not {"link", "iframe", "object", *VOID - {"meta"}} & {
        tag for tag, *_ in parsed.attributes
    }
    assert not re.search(r"@import|url\(", parsed.styles)
    (policy,) = (v for _, name, v in parsed.attributes if name == "content" and "default" in v)
    assert "default-src 'none'" in policy and "http" not in policy
    assert page.stat().st_size < 2_000_000


def test_tables_and_texts_are_shown_as_they_are(page):
    parsed = read_page(page)
    assert parsed.tables["Waiting"] == [["scheduler", "s"], [ATTACK, "12.3"], ["ours", "-"]]
    assert parsed.text.count(ATTACK) == 4  # both titles, the cell and the note
    assert "What was done." in parsed.text
    assert "seats:\n  most: 7" in parsed.text and "vllm-semantic-sched: " in parsed.text


def test_charts_have_their_data(page):
    line, points, boxes = read_page(page).charts["Marks"]
    assert (line["x"], line["y"][0]) == ([0.0, 1.0], 2.0)
    assert (points["x"], points["y"], points["label"]) == ([0.5], [1.25], [ATTACK])
    assert (boxes["left"], boxes["right"]) == ([0.0], [0.75])


def _values(**series):
    return grouped_values("t", "s", ["0", "all"], series, {"a": "red", "b": "blue"})


def test_bars_start_at_zero_and_missing_values_have_none():
    chart = _values(a=[1.0, math.nan], b=[0.5, 4.0])
    first, _, second, _ = chart.marks
    ((_, right, bottom, top, _),) = first.boxes
    assert (bottom, top, chart.log_y) == (0.0, 1.0, False)
    assert right == pytest.approx(second.boxes[0][0])
    assert [box[3:] for box in second.boxes] == [(0.5, "b, 0: 0.5"), (4.0, "b, all: 4")]
    assert chart.x_ticks == {0.0: "0", 1.0: "all"}


def test_values_over_more_than_a_decade_are_dots_with_ranges():
    ranges = {"a": [(0.5, 2.0), (math.nan, math.nan)]}
    chart = grouped_values("t", "s", ["0", "all"], {"a": [1.0, 30.0]}, {"a": "red"}, ranges)
    thin, dots = chart.marks
    assert chart.log_y and "logarithmic" in chart.note
    assert [(x, y) for x, y, _ in dots.points] == [(0.0, 1.0), (1.0, 30.0)]
    assert [box[2:4] for box in thin.boxes] == [(0.5, 2.0)]
    assert not _values(a=[0.0, 30.0]).log_y, "0 is on no logarithmic axis"


def test_sentence_names_gains_and_losses():
    series = {"FCFS": [3.0, 2.0, 1.0], "ours": [0.25, 2.01, 1.5], "none": [0.0, math.nan, 1.0]}
    groups = ["level 0", "level 1", "all levels"]
    assert groups_text(groups, series, "FCFS") == (
        "Level 0: FCFS 3, ours 0.25 (12 times lower), none 0. Level 1: FCFS 2, ours 2.01 (about "
        "the same), none -. In brackets: compared with FCFS."
    )
    assert compared(3.0, 2.0, "less", "as long") == "1.5 times as long"
    assert "times" not in groups_text(groups, series, None)


def test_charts_beside_each_other_have_one_scale(tmp_path):
    charts = [
        Chart(name, "", "", [Boxes("b", [(0.0, end, -0.5, end, "")], "red")], downwards=True)
        for name, end in (("short", 2.0), ("long", 10.0))
    ]
    pair = beside(charts)
    (scale,) = {(chart.x_range, chart.y_range) for chart in pair}
    assert scale[0][1] >= 10.0 and scale[1][1] >= 10.0
    assert beside(charts[:1]) == charts[:1]
    page = read_page(write_page(Page("t", "s", pair, {}, {}), tmp_path))
    assert page.attributes.count(("section", "class", "half")) == 2


def test_what_is_empty_is_left_out(tmp_path):
    marks = [Boxes("level 1", [], "red"), Boxes("level 2", [(0.0, 1.0, 0.0, 1.0, "")], "blue")]
    parts = [
        Table("no rows", ["a"], []),
        Chart("nothing", "", "", marks[:1]),
        Chart("something", "", "", marks, sentence="What to see."),
        Table("first", ["a"], [["1"]], folded=True),
        Table("second", ["a"], [["2"]], folded=True),
    ]
    path = write_page(Page("t", "s", parts, {}, {}), tmp_path)
    page = read_page(path)
    assert [*page.charts] == ["something"] and [*page.tables] == ["first", "second"]
    assert "no rows" not in page.text and "nothing" not in page.text
    data = path.read_text(encoding="utf-8").partition('id="charts"')[2].partition("</script>")[0]
    assert "level 2" in data and "level 1" not in data
    assert "All figures (2 tables)" in page.text
    assert ("div", "aria-label", "something. What to see.") in page.attributes
    assert page.text.count("What to see.") == 1


def test_page_without_charts_is_small(tmp_path):
    path = write_page(Page("t", "s", [TABLE], {}, {}), tmp_path)
    assert path.stat().st_size < 10_000
    assert not read_page(path).charts


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "-"), (12.0, "12"), (0.012345, "0.0123"), (12345.6, "12346"), (2e6, "2000000")],
)
def test_numbers_have_three_digits(value, text):
    assert number_text(value) == text
