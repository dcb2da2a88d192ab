"""Reads an HTML page that a command wrote."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "img", "br", "hr", "input", "base", "source", "embed"}


@dataclass
class ParsedPage:
    """`charts` has the columns of all marks by chart title; `attributes`: (tag, name, value)."""

    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    charts: dict[str, list[dict[str, list]]] = field(default_factory=dict)
    attributes: list[tuple[str, str, str | None]] = field(default_factory=list)
    styles: str = ""
    text: str = ""

    def labels(self, chart: str) -> list[str]:
        """Labels of all marks of a chart."""
        return [label for mark in self.charts[chart] for label in mark.get("label", [])]


def read_page(path: Path) -> ParsedPage:
    """Parse a page; fails if a tag is not closed or closed out of order."""
    parser = _Parser()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert not parser.open, f"never closed: {parser.open}"
    page = parser.page
    for item in json.loads(parser.chart_text):
        page.charts[parser.chart_titles[item["target_id"]]] = list(_sources(item["doc"]))
    return page


def _sources(value: Any):
    if isinstance(value, dict):
        if value.get("name") == "ColumnDataSource":
            data = value["attributes"]["data"]["entries"]
            yield dict(data)
        for item in value.values():
            yield from _sources(item)
    elif isinstance(value, list):
        for item in value:
            yield from _sources(item)


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = ParsedPage()
        self.open: list[str] = []
        self.chart_text = ""
        self.chart_titles: dict[str, str] = {}
        self._title = ""
        self._is_data = False

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.page.attributes += [(tag, name, value) for name, value in attrs]
        if tag in VOID:
            return
        self.open.append(tag)
        self._is_data = given.get("id") == "charts"
        if tag == "h2":
            self._title = ""
        elif tag == "table":
            self.page.tables[self._title] = []
        elif tag == "tr":
            self.page.tables[self._title].append([])
        elif tag in ("th", "td"):
            self.page.tables[self._title][-1].append("")
        elif given.get("class") == "chart":
            self.chart_titles[given["id"]] = self._title

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        if tag == "script":
            self.chart_text += data if self._is_data else ""
        elif tag == "style":
            self.page.styles += data
        else:
            self.page.text += data
            if tag == "h2":
                self._title += data
            elif "td" in self.open or "th" in self.open:
                self.page.tables[self._title][-1][-1] += data
