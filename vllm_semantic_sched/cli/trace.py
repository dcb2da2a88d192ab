"""Turn a server's event log into Gantt charts, a Chrome trace and a table per tier, or verify it.

`semsched trace verify EVENTS` checks whether a line was changed, removed or moved.
"""

import argparse
import json
from collections import defaultdict
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from vllm_semantic_sched.cli.arguments import Failure, failing, positive
from vllm_semantic_sched.cli.console import make_console, save_page
from vllm_semantic_sched.lab.report.runs import trace_page
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.operate.event_log import LogReader, TierSummary, logs_in
from vllm_semantic_sched.policy.record.spans import chrome_trace

_MOST_FINDINGS = 20  # printed
_COUNTS = ("completed", "cancelled", "failed", "refused", "unfinished")
_TIMES = {"queueing delay": "queueing_delay", "TTFT": "ttft", "E2E": "e2e"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the log or logs, the folder for the results and what to draw."""
    add = parser.add_argument
    add(
        "log",
        type=Path,
        nargs="+",
        metavar="[verify] FILE",
        help="the event log; rotated parts are read as well. `verify` takes several, and folders",
    )
    add("--output", type=Path, metavar="DIR", help="folder for the results")
    add(
        "--limit",
        type=positive,
        default=2000,
        metavar="N",
        help="requests in the Chrome trace (default: %(default)s); the table counts all requests",
    )
    add(
        "--since",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="draw only requests that arrived at least this long after the start of the log",
    )


@failing(OSError)
def run(args: argparse.Namespace) -> int:
    """Write trace.json, summary.json and report.html and print the table; 1 if a file cannot be
    read or written, or a log was changed, 2 if it has no events or the arguments are wrong."""
    if args.log[0] == Path("verify"):
        return _verify(args.log[1:])
    if args.output is None or len(args.log) > 1:
        raise Failure("name one log and --output DIR, or `verify`", 2)
    (log,) = args.log
    reader = LogReader(args.limit, args.since)
    drawn = []
    tiers: defaultdict[tuple[int, str], TierSummary] = defaultdict(TierSummary)
    for request in reader.requests(log):
        tiers[request.level, request.tier].add(request)
        if request.keeps_spans:
            drawn.append(request)
    rows = [
        {"level": level, "tier": tier, **summary.row()}
        for (level, tier), summary in sorted(tiers.items(), key=itemgetter(0))
    ]
    if not rows:
        raise Failure(f"{log}: no events found", 2)
    args.output.mkdir(parents=True, exist_ok=True)
    drawn.sort(key=attrgetter("arrival"))
    spans = [span for request in drawn for span in request.spans]
    trace = args.output / "trace.json"
    trace.write_text(json.dumps(chrome_trace(spans, reader.depths)), encoding="utf-8")
    table = args.output / "summary.json"
    table.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    options = {"log": log, "limit": args.limit, "since": args.since}
    pages = save_page(trace_page(rows, spans, reader, options), args.output)
    _print(rows, [trace, table, *pages], reader.unreadable, len(drawn))
    return 0


def _verify(paths: list[Path]) -> int:
    whole = True
    logs = logs_in(paths)
    for log in logs:
        audit = Audit(log)
        for finding in audit.findings[:_MOST_FINDINGS]:
            print(f"{finding.kind:7} {finding.where}: {finding.text}")
        if len(audit.findings) > _MOST_FINDINGS:
            print(f"... {len(audit.findings) - _MOST_FINDINGS} more")
        result = "unchanged" if audit.whole else "CHANGED"
        print(f"{log}: {audit.lines} lines {result}; last hash {audit.chain.last}")
        whole &= audit.whole
    return int(not whole) if logs else 2


def _print(rows: list[dict[str, Any]], written: list[Path], unreadable: int, drawn: int) -> None:
    seen = ["held"] if any(row["held"] for row in rows) else []
    columns = ("level", "tier", "requests", *_COUNTS, "preemptions", *seen, *_TIMES)
    title = "seconds: p50 / p99" + (", held: in all" if seen else "")
    table = make_table(title, *columns, words=0)
    for name in ("tier", "preemptions"):
        table.columns[columns.index(name)].justify = "left"
    for row in rows:
        preemptions = ", ".join(f"{n} {kind}" for kind, n in sorted(row["preemptions"].items()))
        table.add_row(
            *(str(row[name]) for name in ("level", "tier", "requests", *_COUNTS)),
            preemptions or "-",
            *(f"{row[name]:.{int(name == 'held')}f}" for name in seen),
            *(_percentiles(row, name) for name in _TIMES.values()),
        )
    console = make_console()
    console.print(table)
    if unreadable:
        console.print(f"{unreadable} lines could not be read")
    names = " ".join(map(str, written))
    console.print(f"written, with the first {drawn} requests: {names}", soft_wrap=True)


def _percentiles(row: dict[str, Any], name: str) -> str:
    p50 = row[f"{name}_p50"]
    p99 = row[f"{name}_p99"]
    return "-" if p50 is None else f"{p50:.3f} / {p99:.3f}"
