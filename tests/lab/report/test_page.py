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
    grouped_bars,
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


def test_grouped_bars_skip_missing_values():
    chart = grouped_bars(
        "t", "s", ["0", "all"], {"a": [1.0, math.nan], "b": [0.5, 4.0]}, {"a": "red", "b": "blue"}
    )
    first, second = chart.marks
    ((_, right, bottom, top, _),) = first.boxes
    assert top == 1.0 and bottom == 0.25  # a logarithmic axis has no 0
    assert right == pytest.approx(second.boxes[0][0])
    assert [box[3:] for box in second.boxes] == [(0.5, "b, 0: 0.5"), (4.0, "b, all: 4")]
    assert chart.x_ticks == {0.0: "0", 1.0: "all"}


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
