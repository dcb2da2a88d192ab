"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 160


def make_console() -> Console:
    """A console wide enough for the tables, also where the output is a file."""
    return Console(width=max(_WIDTH, Console().width), highlight=False)
