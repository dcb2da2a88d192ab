"""Tables of comparisons of schedulers on real servers."""

from rich.console import Console
from rich.text import Text

from vllm_semantic_sched.cli.console import make_table
from vllm_semantic_sched.lab.bench import page
from vllm_semantic_sched.lab.bench.results import Rows
from vllm_semantic_sched.lab.report.content import Table

_TITLE_WIDTH, _TEXT_WIDTH = 16, 76


def print_summary(console: Console, mix: str, rows: Rows) -> None:
    """Print one row per scheduler, and what the rows show in words."""
    first = next(iter(rows.values()))
    table = make_table(
        f"mix {mix}: {len(first.workload.requests)} requests at {first.overload:.2g} times what "
        "the engine can serve",
        "scheduler", "urgency 0:\np99 TTFT, s", "urgency 0: time per\ntoken / idle engine",
        "all levels:\nms per token", "output\ntokens/s",
    )  # fmt: skip
    for row in rows.values():
        waiting = page.fixed(1e3 * row.levels["all"]["normalized_waiting"].mean)
        urgent = (page.fixed(row.p99_ttft()), page.fixed(row.best.idle_ratio))
        table.add_row(row.scheduler.title, *urgent, waiting, f"{row.best.tokens_per_second:.0f}")
    table.caption = "time per token: from arrival to the last token, waiting included"
    console.print()
    console.print(table)
    console.print(page.gain_in_words(rows), soft_wrap=True)


def print_mix(console: Console, mix: str, rows: Rows) -> None:
    """Print all tables of a mix so that they fit a terminal of 100 columns."""
    console.print()
    for content in page.mix_tables(mix, rows):
        _print(console, content)
    for content in page.misread_tables(mix, rows):
        if content.rows:
            _print(console, content, words=len(content.columns))
        else:
            console.print(content.title)


def _print(console: Console, content: Table, words: int = 1) -> None:
    table = make_table(content.title, *content.columns, words=words)
    table.columns[0].max_width = _TITLE_WIDTH
    table.padding = (0, 0, 0, 1)
    table.pad_edge = False
    for column in table.columns[1:]:
        column.no_wrap, column.max_width = True, _TEXT_WIDTH
    for row in content.rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    table.caption = content.note
    console.print(table)
