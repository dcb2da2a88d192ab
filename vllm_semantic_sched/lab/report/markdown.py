"""Writes the texts and tables of a page as Markdown that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vllm_semantic_sched.lab.report.content import Page, Table, is_word


def markdown(page: Page, links: Mapping[str, str] | None = None) -> str:
    """Title, sentence and tables of a page, without its charts.

    Args:
        links: targets of cells with these texts.
    """
    lines = [f"# {page.title}", "", page.sentence, ""]
    for part in page.parts:
        if isinstance(part, Table):
            table = [*_table(part, links or {}), ""] if part.rows else []
            lines += [f"## {part.title}", "", *table, *([part.note, ""] if part.note else [])]
    return "\n".join(lines)


def _table(table: Table, links: Mapping[str, str]) -> Iterator[str]:
    """Lines with aligned columns; those of numbers to the right."""

    def cell(value: object) -> str:
        text = str(value).replace("|", "\\|")
        return f"[{text}]({links[text]})" if text in links else text

    rows = [[cell(value) for value in row] for row in (table.columns, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    words = [any(map(is_word, column)) or not place
             for place, column in enumerate(zip(*table.rows, strict=True))]  # fmt: skip

    def line(cells: Sequence[str]) -> str:
        places = zip(cells, widths, words, strict=True)
        padded = (text.ljust(width) if word else text.rjust(width) for text, width, word in places)
        return f"| {' | '.join(padded)} |"

    head, *body = rows
    yield line(head)
    yield line(["-" * (width - 1) + ":-"[word] for width, word in zip(widths, words, strict=True)])
    yield from map(line, body)
