"""Tables, and where they are printed. `rich` belongs to an extra: it is imported when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 160


def make_console() -> Console:
    """A console wide enough for the tables, also where the output is a file."""
    from rich.console import Console

    return Console(width=max(_WIDTH, Console().width), highlight=False)


def make_table(title: str, *columns: str, words: int = 1) -> Table:
    """A table whose first `words` columns hold words and the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < words else "right")
    return table
