"""Say why a request waited, or the requests of a level, from the event log."""

import argparse
import re
import textwrap
from pathlib import Path

from vllm_semantic_sched.cli.arguments import Failure, failing
from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.operate import why
from vllm_semantic_sched.operate.event_log import logs_in

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WIDTH = 100
_MOST_LINES = 16  # of a timeline


def duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `10m`, `2h` or `1d`."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if matched is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 10m, 2h, 1d")
    return float(matched[1]) * _UNITS[matched[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the request and the logs, or which requests to add up."""
    add = parser.add_argument
    add(
        "names",
        nargs="+",
        metavar="[REQUEST] EVENTS",
        help=(
            "the request's id, as the client got it, then event logs or folders of them; without "
            "an id all requests are added up"
        ),
    )
    add("--level", type=int, metavar="LEVEL", help="add up the requests of this urgency level")
    add("--last", type=duration, metavar="TIME", help="only the end of the log: 90s, 10m, 2h, 1d")


@failing(OSError)
def run(args: argparse.Namespace) -> None:
    """Print the answer; 1 if a log cannot be read, 2 if it has no such request."""
    names = list(args.names)
    adds_up = args.level is not None or args.last is not None or Path(names[0]).exists()
    request = "" if adds_up else names.pop(0)
    logs = logs_in(map(Path, names))
    if not logs:
        named = " ".join(names) or request
        raise Failure(f"no event log at {named}; of a request, give the id and then the log", 2)
    try:
        if adds_up:
            return _print_summary(why.summarize(logs, args.level, args.last), args.level)
        account = why.account_of(logs, request)
        if account is not None:
            return _print_account(account)
    except KeyError as error:
        raise Failure(f"a line of the log lacks the field {error}") from error
    raise Failure(f"no request {request!r} in {' '.join(map(str, logs))}", 2)


def _print_account(account: why.Account) -> None:
    events = why.timeline(account)
    print(textwrap.fill(why.sentence(account), _WIDTH))
    print()
    if len(events) > _MOST_LINES:
        half = _MOST_LINES // 2
        left_out = len(events) - _MOST_LINES
        events[half:-half] = [(events[half][0], f"... {left_out} more")]
    for second, text in events:
        print(f"{second:9.3f} s  {textwrap.shorten(text, _WIDTH - 13)}")
    print(f"\npolicy {account.last.get('policy', 'unknown')}")


def _print_summary(summary: why.Summary, level: int | None) -> None:
    if not summary.requests:
        if not summary.levels:
            raise Failure("no request in the log, or in that part of it", 2)
        levels = ", ".join(map(str, sorted(summary.levels)))
        raise Failure(f"no request of level {level} in the log; it has levels {levels}", 2)
    total = summary.seconds.total()
    of_level = "" if level is None else f" of level {level}"
    requests = why.requests_text(len(summary.requests))
    print(f"{requests}{of_level} waited {why.seconds_text(total)} in all")
    rows = []
    for text, seconds in summary.seconds.most_common():
        longest, request = summary.longest[text]
        times = summary.counts[text]
        rows.append([text, why.seconds_text(seconds), times, why.seconds_text(longest), request])
    if rows:
        print_table("", ("why", "time", "times", "longest", "request"), rows)
