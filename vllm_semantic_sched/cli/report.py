"""Tables of comparisons of schedulers on real servers."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from vllm_semantic_sched.cli.console import make_table
from vllm_semantic_sched.lab.bench import page
from vllm_semantic_sched.lab.bench.metrics import Summary, fairness, finish_order_violations
from vllm_semantic_sched.lab.bench.results import Rows
from vllm_semantic_sched.lab.bench.targets import Target
from vllm_semantic_sched.lab.report import content

_REFERENCE = "fcfs"
_TITLE_WIDTH = 16
_TEXT_WIDTH = 80
_TARGET_WIDTH = 58
_VERDICTS = {"met": "[green]met[/]", "missed": "[red]missed[/]"}


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
    """Print rounds and totals of a mix, a table per urgency level, and what was misread."""
    first = next(iter(rows.values()))
    console.print()
    console.rule(f"mix {mix}: {len(first.workload.requests)} requests")
    _print(console, page.rounds_table(mix, rows))
    _print(console, page.totals_table(mix, rows))
    console.print(_orders(rows))
    for level in first.levels:
        _print(console, _level_table(level, rows))
    console.print(
        "norm. waiting = (finish - arrival) / output tokens, ms per token; / idle = norm. waiting "
        "over\nthat of the same requests on the idle engine, same round; slowdown = E2E / E2E on "
        "an idle engine\n(fitted); gain = FCFS / this row."
    )
    _print_misread(console, rows)


def print_targets(console: Console, targets: Iterable[Target]) -> None:
    _print(console, page.targets_table(targets), _TARGET_WIDTH)


def _print(console: Console, content: content.Table, width: int = _TITLE_WIDTH) -> None:
    """Print a table whose titles wrap, so that it fits a terminal of 100 columns."""
    table = make_table(content.title, *content.columns)
    table.columns[0].max_width = width
    table.padding = (0, 0, 0, 1)
    table.pad_edge = False
    for column in table.columns[1:]:
        column.no_wrap = True
    for row in content.rows:
        table.add_row(*(_VERDICTS.get(str(cell), str(cell)) for cell in row))
    table.caption = content.note
    console.print(table)


def _orders(rows: Rows) -> Table:
    tenants = next(iter(rows.values())).workload.config.tenants
    title, columns = "finish order (eq. 2)", ["there when a less urgent one finished"]
    if tenants:
        title, columns = f"{title}, fairness", [*columns, "Jain's index"]
    table = make_table(title, "scheduler", *columns)
    for row in rows.values():
        index = [page.fixed(fairness(row.records))] if tenants else []
        share = f"{100 * finish_order_violations(row.records):.0f} %"
        table.add_row(row.scheduler.title, share, *index)
    return table


def _level_table(level: str, rows: Rows) -> content.Table:
    urgent, first = level == "0", next(iter(rows.values()))
    counts = first.levels[level]["ttft"]
    title = "all levels" if level == "all" else f"urgency {level}"
    title += (" (most urgent)" if urgent else "") + f", {counts.count} requests"
    if counts.tail_count != counts.count:
        title += f" (p99: {counts.tail_count})"
    columns = [
        "scheduler", "TTFT, s\nmean p50 p99", "TPOT\nms", "E2E\ns", "norm. wait.\nmean p99",
        *(["/ idle"] if urgent else []), "slow-\ndown", "norm.w.\ngain", "p99 TTFT\ngain",
    ]  # fmt: skip
    base = rows[_REFERENCE].levels.get(level) if _REFERENCE in rows else None
    lines = []
    if urgent and "0" in first.idle_levels:
        lines.append(["idle engine", *_cells(first.idle_levels["0"], base, ["-"])])
    for row in rows.values():
        cells = ["-"] * (len(columns) - 1)
        if level in row.levels:
            ratio = [page.fixed(row.best.idle_ratio)] if urgent else []
            cells = _cells(row.levels[level], base, ratio)
        lines.append([row.scheduler.title, *cells])
    return content.Table(title, columns, lines)


def _cells(
    summaries: Mapping[str, Summary], base: Mapping[str, Summary] | None, ratio: list[str]
) -> list[str]:
    ttft, waiting = summaries["ttft"], summaries["normalized_waiting"]
    gains = ["-", "-"]
    if base is not None:
        waits = base["normalized_waiting"].mean / waiting.mean
        gains = [f"{waits:.2f}x", f"{base['ttft'].p99 / ttft.p99:.2f}x"]
    return [
        " ".join(map(page.fixed, (ttft.mean, ttft.p50, ttft.p99))),
        *(page.fixed(1e3 * summaries["tpot"].mean), page.fixed(summaries["e2e"].mean)),
        f"{page.fixed(1e3 * waiting.mean)} {page.fixed(1e3 * waiting.p99)}",
        *(*ratio, page.fixed(summaries["slowdown"].mean), *gains),
    ]


def _print_misread(console: Console, rows: Rows) -> None:
    for row in rows.values():
        if not row.scheduler.reads_text:
            continue
        misread = {record.index: record.read_level for record in row.misread}
        console.print(f"{row.scheduler.title}: {len(misread)} of urgency 0 read as less urgent")
        for index, level in misread.items():
            text = row.workload.requests[index].text
            shown = text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 3] + "..."
            console.print(f"  read as {level}: {shown}", markup=False, soft_wrap=True)
