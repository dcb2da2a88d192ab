"""Tables, texts and pages, and where they go."""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from vllm_semantic_sched.cli.arguments import installing
from vllm_semantic_sched.lab.report.content import Page
from vllm_semantic_sched.lab.report.page import FILE_NAME, write_page
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config.section import Section, keys_of

_WIDTH = 160


def make_console() -> Console:
    """A console wide enough for the tables, also where the output is a file."""
    return Console(width=max(_WIDTH, Console().width), highlight=False)


def print_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], words: int = 1
) -> None:
    """Print rows of any values, as texts; see `make_table`."""
    table = make_table(title, *columns, words=words)
    for row in rows:
        table.add_row(*map(str, row))
    make_console().print(table)


def save_page(page: Page, folder: Path) -> list[Path]:
    """Write report.html to a folder; its path, or none if what draws charts is not installed: then
    a message says how to install it. OSError if the file cannot be written."""
    try:
        return [write_page(page, folder)]
    except ModuleNotFoundError as error:
        print(
            f"{FILE_NAME}: not written ({error}); {installing('lab')} installs what it needs",
            file=sys.stderr,
        )
        return []


def describe_keys(model: type[Section]) -> str:
    """All keys of a kind of file as text: name, default, valid values and meaning."""
    lines = []
    for key in keys_of(model):
        valid = f"   ({key.valid})" if key.valid else ""
        lines.append(f"{key.name}: {key.default}{valid}".rstrip())
        lines += textwrap.wrap(key.meaning, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"
