"""Tables in a terminal."""

from rich import box
from rich.table import Table


def make_table(title: str, *columns: str, words: int = 1) -> Table:
    """A table whose first `words` columns hold words and the others figures."""
    table = Table(title=title, box=box.SIMPLE)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < words else "right")
    return table
