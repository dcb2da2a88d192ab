"""Watch running servers in the terminal: queues, latencies, preemptions, KV use.

Increases, such as times to first token, are those of the last minute. The first frame, and so
--once, counts from the start of the server. p pauses the servers, r resumes them, l reloads their
policy: on the server's own machine, with its API key if it has one, and if it runs the middleware.
"""

import argparse
import json
import math
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_semantic_sched.cli.arguments import LOCAL_SERVER, Failure, add_server_arguments
from vllm_semantic_sched.operate.client import AdminClient, AdminError
from vllm_semantic_sched.operate.figures import Figures, TierFigures, compute
from vllm_semantic_sched.operate.watch import ServerState, ServerWatch

Cell = str | tuple[str, str]  # a text, in its usual style or in that one

_WIDTH = 100
_REDRAW = 0.5  # seconds
# Of levels 0 to 4 and beyond, and of what an operator should look at.
_LEVELS = ("bold red", "red", "yellow", "green", "blue")
_STYLES = {
    "no answer": "red",
    "down": "red",
    "loading": "yellow",
    "paused": "yellow",
    "observes": "cyan",  # vLLM orders the requests by itself
    "answers": "green",
}
_SERVERS = ("server", "state", "running", "waiting", "KV", "host pool", "predictor", "policy")
_TIERS = ("tier", "level", "waiting", "running", "held", "oldest", "started", "TTFT p50", "p99")
_FULL = 0.95  # share of the KV cache or the host pool in use
_HELP = "p pause   r resume   l reload policy   q quit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the servers, the interval and the formats."""
    add_server_arguments(parser, several=True)
    add = parser.add_argument
    add(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="between two readings (default: %(default)g)",
    )
    add("--once", action="store_true", help="print one frame; exit status 1 if no server answers")
    add("--json", action="store_true", help="print JSON, an object per line and reading")


def run(args: argparse.Namespace) -> int:
    """Watch the servers until q or Ctrl-C; with --once 1 if no server answers; 2 without a
    terminal."""
    watches = [ServerWatch(AdminClient(url, args.api_key)) for url in args.server or [LOCAL_SERVER]]
    if args.once or args.json:
        return _print(watches, args)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise Failure("needs a terminal; use --once or --json", 2)
    _show(watches, args.interval)
    return 0


def _print(watches: Sequence[ServerWatch], args: argparse.Namespace) -> int:
    # No control codes in a pipe, whatever the environment asks for.
    terminal = sys.stdout.isatty()
    width = min(_WIDTH, Console().width) if terminal else _WIDTH
    console = Console(width=width, force_terminal=terminal, highlight=False)
    with ThreadPoolExecutor(len(watches)) as pool:
        while True:
            states = list(pool.map(lambda watch: watch.poll(), watches))
            if args.json:
                total = _total(states)
                shown = {"servers": [state.as_json() for state in states]}
                print(json.dumps(shown | {"total": total and asdict(total)}), flush=True)
            else:
                console.print(draw(states))
            if args.once:
                return int(not any(state.figures for state in states))
            time.sleep(args.interval)


def draw(states: Sequence[ServerState], messages: Mapping[str, str] | None = None) -> Group:
    """One frame. `messages`: results of the operator's actions by server; None without keys."""
    total = _total(states)
    gap = Text()
    lines: list[Text | Table] = [Text(f"semsched top   {time.strftime('%H:%M:%S')}", "bold")]
    lines += [gap, _table(None, _SERVERS, map(_server_row, states))]
    lines += [Text(f"{state.url}: {state.error}", "yellow") for state in states if state.error]
    if total is not None:
        window = "since the start" if total.window is None else f"last {total.window:.0f} s"
        if total.tiers:
            title = f"held, started and TTFT: {window}"
            lines += [gap, _table(title, _TIERS, map(_tier_row, total.tiers))]
        kinds = ", ".join(f"{kind} {count}" for kind, count in total.preemptions.items() if count)
        lines += [gap, Text(f"preemptions, {window}: {kinds or 'none'}")]
        if total.hold_cost is not None:
            share = f"{100 * total.hold_cost:.1f} %"
            lines.append(Text(f"holds, last minute of work: {share} of the engine's time"))
    if messages is not None:
        lines += [gap, *(Text(f"{url}: {message}") for url, message in messages.items())]
        reason = next((state.locked for state in states if state.locked), "no server answers")
        locked = f"q quit   (no operator's keys: {reason})"
        keys = _HELP if any(state.open for state in states) else locked
        lines.append(Text(keys, "dim"))
    return Group(*lines)


def _total(states: Sequence[ServerState]) -> Figures | None:
    intervals = [state.interval for state in states if state.interval is not None]
    return compute(intervals) if intervals else None


def _server_row(state: ServerState) -> list[Cell]:
    figures = state.figures
    name = state.url.removeprefix("http://")
    if figures is None:
        return [name, "no answer"]
    doing = "observes" if figures.observing else "answers"
    if state.paused:
        doing = "paused"
    predictor: str = figures.predictor or "-"
    if figures.predictor == "up" and figures.predictor_queue:
        predictor = f"{figures.predictor_queue} queued"
    running = sum(tier.running for tier in figures.tiers)
    waiting = sum(tier.waiting for tier in figures.tiers)
    versions = "/".join(f"v{version}" for version in figures.policy_versions) or "-"
    return [
        name,
        doing,
        str(running),
        str(waiting),
        _percent(figures.kv_use),
        _percent(figures.host_pool_use),
        predictor,
        f"{versions} + canary" if figures.canary else versions,
    ]


def _tier_row(tier: TierFigures) -> list[Cell]:
    last = len(_LEVELS) - 1
    style = _LEVELS[last if tier.level is None else min(tier.level, last)]
    return [
        (tier.tier, style),
        "-" if tier.level is None else str(tier.level),
        str(tier.waiting),
        str(tier.running),
        "-" if tier.held is None else f"{tier.held:.1f}",
        _time(tier.longest_wait),
        str(tier.started),
        _time(tier.ttft_p50),
        _time(tier.ttft_p99),
    ]


def _table(title: str | None, columns: Sequence[str], rows: Iterable[list[Cell]]) -> Table:
    """A table that fits 80 columns; a long first column is cut. Text in brackets is not markup."""
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column(columns[0], overflow="ellipsis")
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        pairs = [(cell, _STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in row]
        table.add_row(*(Text(text, style) for text, style in pairs))
    return table


def _percent(share: float | None) -> Cell:
    if share is None:
        return "-"
    return f"{share:.0%}", "yellow" if share >= _FULL else ""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (0 < seconds < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _show(watches: Sequence[ServerWatch], interval: float) -> None:
    """Redraw and obey keys until q."""

    def keep_reading(watch: ServerWatch) -> None:
        while True:
            watch.poll()
            time.sleep(interval)

    for watch in watches:
        threading.Thread(target=keep_reading, args=(watch,), daemon=True).start()
    messages: dict[str, str] = {}  # the latest of each server
    live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
    key = None
    with live, _keys_of_terminal() as wait:
        while key != "q":
            states = [watch.state for watch in watches]
            live.update(draw(states, dict(messages)), refresh=True)
            key = wait(_REDRAW)
            for watch in watches:
                _act(watch, key, messages)


def _act(watch: ServerWatch, key: str | None, messages: dict[str, str]) -> None:
    """Start what a key stands for on a thread, since a pause takes as long as running requests."""
    actions: dict[str | None, tuple[str, Callable[[], str]]] = {
        "p": ("pausing; running requests finish", watch.pause),
        "r": ("resuming", watch.resume),
        "l": ("reloading the policy", watch.reload),
    }
    if key not in actions or not watch.state.open:
        return
    url = watch.state.url
    messages[url], action = actions[key]

    def run() -> None:
        try:
            messages[url] = action()
        except AdminError as error:
            messages[url] = f"refused: {error}"

    threading.Thread(target=run, daemon=True).start()


@contextmanager
def _keys_of_terminal() -> Iterator[Callable[[float], str | None]]:
    """Gives a function that waits so many seconds for a key; None if none is pressed."""
    saved = termios.tcgetattr(sys.stdin)

    def wait(seconds: float) -> str | None:
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return None
        # Not through sys.stdin: select does not see what Python has buffered.
        key = os.read(sys.stdin.fileno(), 1)
        return key.decode(errors="replace").lower() or "q"  # nothing: the terminal is gone

    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
