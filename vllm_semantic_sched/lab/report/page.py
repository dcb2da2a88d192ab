"""Writes a page as one HTML file that loads nothing, with scripts, styles and data inside, or its
texts and tables as Markdown. Bokeh draws the charts; it comes with the extra `lab`."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

import yaml

from vllm_semantic_sched.lab.report.content import (
    Chart,
    Page,
    Table,
    has_data,
    is_word,
    number_text,
)

FILE_NAME = "report.html"

_SHORT = 24  # characters of a cell that stays on one line


def write_page(page: Page, folder: Path) -> Path:
    """Write report.html to a folder; returns its path. ModuleNotFoundError without Bokeh, or Jinja,
    which comes with it; OSError if the file cannot be written."""
    from jinja2 import Environment

    from vllm_semantic_sched.lab.report.charts import chart_json, script

    # Texts of requests are shown: whatever they contain, it must not become markup.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Bokeh's objects refer to earlier ones: their order must stay.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["cell"] = lambda cell: cell if isinstance(cell, str) else number_text(cell)
    environment.tests["word"] = is_word
    environment.tests["chart"] = lambda part: isinstance(part, Chart)
    environment.tests["short"] = lambda cell: len(cell) <= _SHORT
    template = resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8")
    shown = [(f"part-{n}", part) for n, part in enumerate(filter(has_data, page.parts))]
    charts = {element: part for element, part in shown if isinstance(part, Chart)}
    text = environment.from_string(template).render(
        page=page,
        groups=[(folded, [*group]) for folded, group in itertools.groupby(shown, _is_folded)],
        script=script() if charts else "",
        charts=[chart_json(chart, element) for element, chart in charts.items()],
        configuration=_yaml(page.configuration),
        versions=_yaml(page.versions),
    )
    path = folder / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path


def _is_folded(item: tuple[str, Table | Chart]) -> bool:
    return isinstance(item[1], Table) and item[1].folded


def _yaml(values: object) -> str:
    """Values as YAML; what YAML has no form for, such as a path, as text."""
    return yaml.safe_dump(json.loads(json.dumps(values, default=str)), sort_keys=False)


def markdown(page: Page, links: Mapping[str, str] | None = None) -> str:
    """Title, sentence and tables of a page, which read well in a terminal, too, without its charts.
    `links` are the targets of cells with these texts."""
    lines = [f"# {page.title}", "", page.sentence, ""]
    for part in page.parts:
        if isinstance(part, Table):
            lines += [f"## {part.title}", ""]
            if part.rows:
                lines += [*_markdown_table(part, links or {}), ""]
            if part.note:
                lines += [part.note, ""]
    return "\n".join(lines)


def _markdown_table(table: Table, links: Mapping[str, str]) -> Iterator[str]:
    """Lines with aligned columns; those of numbers to the right."""

    def cell(value: object) -> str:
        text = str(value).replace("|", "\\|")
        return f"[{text}]({links[text]})" if text in links else text

    rows = [[cell(value) for value in row] for row in (table.columns, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    words = [any(map(is_word, column)) for column in zip(*table.rows, strict=True)]
    words[0] = True

    def line(cells: Sequence[str]) -> str:
        padded = [
            text.ljust(width) if word else text.rjust(width)
            for text, width, word in zip(cells, widths, words, strict=True)
        ]
        return f"| {' | '.join(padded)} |"

    head, *body = rows
    yield line(head)
    rules = []
    for width, word in zip(widths, words, strict=True):
        rules.append("-" * width if word else "-" * (width - 1) + ":")
    yield line(rules)
    yield from map(line, body)
