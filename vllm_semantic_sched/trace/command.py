"""`semsched trace`: an event log as a Gantt chart, a Chrome trace and a table per tier."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched trace`."""
    add = parser.add_argument
    add("log", type=Path, metavar="FILE", help="the event log; its renamed parts are read too")
    add("--output", type=Path, required=True, metavar="DIR", help="where pictures and files go")
    add(
        "--limit",
        type=_positive,
        default=2000,
        metavar="N",
        help="requests in the Chrome trace (default: %(default)s); the table counts all",
    )
    add(
        "--rows",
        type=_positive,
        default=80,
        metavar="N",
        help="requests in the Gantt chart (default: %(default)s)",
    )
    add(
        "--since",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="draw requests that arrived so long after the log's first line, or later",
    )


def run(args: argparse.Namespace) -> int:
    """Write gantt.png, trace.json and summary.json, print the table; 2 if there is nothing to
    read, 1 if the log or the folder cannot be used."""
    from vllm_semantic_sched.spans import chrome_trace, draw_gantt
    from vllm_semantic_sched.trace.reader import LogReader
    from vllm_semantic_sched.trace.summary import Summary

    reader, summary, drawn = LogReader(args.limit, args.since), Summary(), []
    try:
        for life in reader.lives(args.log):
            summary.add(life)
            if life.keeps_spans:
                drawn.append(life)
        rows = summary.rows()
        if not rows:
            print(f"semsched trace: {args.log}: no events in it", file=sys.stderr)
            return 2
        args.output.mkdir(parents=True, exist_ok=True)
        drawn.sort(key=lambda life: life.arrival)
        spans = [span for life in drawn for span in life.spans]
        charted = [span for life in drawn[: args.rows] for span in life.spans]
        trace = chrome_trace(spans, reader.depths)
        (args.output / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
        (args.output / "summary.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        draw_gantt(charted, args.output / "gantt.png", str(args.log.name))
    except OSError as error:
        print(f"semsched trace: {error}", file=sys.stderr)
        return 1
    _print(rows, args, reader.unreadable, len(drawn))
    return 0


def _print(rows: list[dict[str, Any]], args: argparse.Namespace, bad: int, drawn: int) -> None:
    from rich import box
    from rich.table import Table

    from vllm_semantic_sched.cli.console import make_console

    table = Table(title="seconds: p50 / p99", box=box.SIMPLE)
    for column in (
        "level", "tier", "requests", "completed", "cancelled", "failed", "refused", "unfinished",
        "preemptions", "queueing delay", "TTFT", "E2E",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("tier", "preemptions") else "right")
    for row in rows:
        counts = [row[n] for n in ("completed", "cancelled", "failed", "refused", "unfinished")]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["preemptions"].items()))
        table.add_row(
            *map(str, (row["level"], row["tier"], row["requests"], *counts)),
            kinds or "-",
            *(_times(row, name) for name in ("queueing_delay", "ttft", "e2e")),
        )
    console = make_console()
    console.print(table)
    if bad:
        console.print(f"{bad} lines could not be read")
    names = " ".join(str(args.output / n) for n in ("gantt.png", "trace.json", "summary.json"))
    console.print(f"written, with the first {drawn} requests: {names}", soft_wrap=True)


def _times(row: dict[str, Any], name: str) -> str:
    p50, p99 = row[f"{name}_p50"], row[f"{name}_p99"]
    return "-" if p50 is None else f"{p50:.3f} / {p99:.3f}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
