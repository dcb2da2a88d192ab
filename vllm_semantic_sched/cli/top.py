"""Watch running servers in the terminal: queues, latencies, preemptions, KV use.

Increases, such as times to first token, are those of the last minute. The first frame, and so
--once, counts from the start of the server. p pauses the servers, r resumes them, l reloads their
policy: on the server's own machine, with its API key if it has one, and if it runs the middleware.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_semantic_sched.cli.arguments import add_server_arguments, fail

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from vllm_semantic_sched.operate.figures import Figures
    from vllm_semantic_sched.operate.watch import ServerState, ServerWatch

_WIDTH = 100
_REDRAW = 0.5  # seconds
# Of levels 0 to 4 and beyond, and of what an operator should look at.
_LEVELS = ("bold red", "red", "yellow", "green", "blue")
_STYLES = {
    "no answer": "red",
    "down": "red",
    "paused": "yellow",
    "observes": "cyan",  # vLLM orders the requests by itself
    "answers": "green",
}
_FULL = 0.95  # share of the KV cache or the host pool in use
_HELP = "p pause   r resume   l reload policy   q quit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched top`."""
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
    """Watch the servers until q or Ctrl-C.

    Returns:
        0; with --once 1 if no server answers; 2 without a terminal.
    """
    from vllm_semantic_sched.operate.client import AdminClient
    from vllm_semantic_sched.operate.watch import ServerWatch

    watches = [ServerWatch(AdminClient(url, args.api_key)) for url in args.server]
    if args.once or args.json:
        return _print(watches, args)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail("top", "needs a terminal; use --once or --json", 2)
    for watch in watches:
        threading.Thread(target=_keep_reading, args=(watch, args.interval), daemon=True).start()
    _show(watches)
    return 0


def _print(watches: Sequence[ServerWatch], args: argparse.Namespace) -> int:
    with ThreadPoolExecutor(len(watches)) as pool:
        while True:
            states = list(pool.map(lambda watch: watch.poll(), watches))
            if args.json:
                print(json.dumps(as_json(states)), flush=True)
            else:
                _console().print(draw(states))
            if args.once:
                return 0 if any(state.figures for state in states) else 1
            time.sleep(args.interval)


def as_json(states: Sequence[ServerState]) -> dict[str, object]:
    """The figures of each server and of all together; plain values."""
    total = _total(states)
    return {
        "servers": [state.as_json() for state in states],
        "total": None if total is None else total.as_json(),
    }


def draw(states: Sequence[ServerState], messages: Mapping[str, str] | None = None) -> Group:
    """One frame.

    Args:
        messages: results of the operator's actions by server; None where there are no keys.
    """
    from rich.console import Group
    from rich.text import Text

    total = _total(states)
    gap = Text()
    lines: list[Text | Table] = [Text(f"semsched top   {time.strftime('%H:%M:%S')}", "bold")]
    lines += [gap, _server_table(states)]
    lines += [Text(f"{s.url}: {s.error}", "yellow") for s in states if s.error]
    if total is not None:
        window = "since the start" if total.window is None else f"last {total.window:.0f} s"
        kinds = ", ".join(f"{kind} {count}" for kind, count in total.preemptions.items() if count)
        lines += [gap, _tier_table(total, window)] if total.tiers else []
        lines += [gap, Text(f"preemptions, {window}: {kinds or 'none'}")]
        if total.hold_cost is not None:
            share = f"{100 * total.hold_cost:.1f} %"
            lines.append(Text(f"holds, last minute of work: {share} of the engine's time"))
    if messages is not None:
        lines += [gap, *(Text(f"{url}: {message}") for url, message in messages.items())]
        lines += [Text(_keys(states), "dim")]
    return Group(*lines)


def _keys(states: Sequence[ServerState]) -> str:
    if any(state.open for state in states):
        return _HELP
    reasons = (state.locked for state in states if state.locked)
    return f"q quit   (no operator's keys: {next(reasons, 'no server answers')})"


def _total(states: Sequence[ServerState]) -> Figures | None:
    from vllm_semantic_sched.operate.figures import combine

    each = [state.figures for state in states if state.figures is not None]
    return combine(each) if each else None


def _server_table(states: Sequence[ServerState]) -> Table:
    columns = ("state", "running", "waiting", "KV", "host pool", "predictor", "policy")
    table = _table(None, "server", *columns)
    for state in states:
        figures, name = state.figures, state.url.removeprefix("http://")
        if figures is None:
            _add(table, name, "no answer")
            continue
        predictor = {None: "-", True: "up", False: "down"}[figures.predictor_up]
        if figures.predictor_up and figures.predictor_queue:
            predictor = f"{figures.predictor_queue} queued"
        _add(
            table,
            name,
            "paused" if state.paused else "observes" if figures.observing else "answers",
            str(figures.running),
            str(figures.waiting),
            _percent(figures.kv_use),
            _percent(figures.host_pool_use),
            predictor,
            ("/".join(f"v{version}" for version in figures.policy_versions) or "-")
            + (" + canary" if figures.canary else ""),
        )
    return table


def _tier_table(total: Figures, window: str) -> Table:
    columns = ("waiting", "running", "held", "oldest", "started", "TTFT p50", "p99")
    table = _table(f"held, started and TTFT: {window}", "tier", "level", *columns)
    for tier in total.tiers:
        level = len(_LEVELS) - 1 if tier.level is None else tier.level
        _add(
            table,
            (tier.tier, _LEVELS[min(level, len(_LEVELS) - 1)]),
            "-" if tier.level is None else str(tier.level),
            str(tier.waiting),
            str(tier.running),
            "-" if tier.held is None else f"{tier.held:.1f}",
            _time(tier.longest_wait),
            str(tier.started),
            _time(tier.ttft_p50),
            _time(tier.ttft_p99),
        )
    return table


def _table(title: str | None, first: str, *columns: str) -> Table:
    """A table that fits 80 columns; a long first column is cut."""
    from rich.table import Table

    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.title_justify = "left"
    table.add_column(first, overflow="ellipsis")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _add(table: Table, *cells: str | tuple[str, str]) -> None:
    """Add a row of texts, some with a style; text in brackets is not markup."""
    from rich.text import Text

    pairs = [(cell, _STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in cells]
    table.add_row(*(Text(text, style) for text, style in pairs))


def _percent(share: float | None) -> str | tuple[str, str]:
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


def _console() -> Console:
    """For single frames: no control codes in a pipe, whatever the environment asks for."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = min(_WIDTH, Console().width) if terminal else _WIDTH
    return Console(width=width, force_terminal=terminal, highlight=False)


# The live view


def _keep_reading(watch: ServerWatch, interval: float) -> None:
    while True:
        watch.poll()
        time.sleep(interval)


def _show(watches: Sequence[ServerWatch]) -> None:
    """Redraw and obey keys until q."""
    from rich.console import Console
    from rich.live import Live

    actions = _Actions(watches)
    console = Console(highlight=False)
    with (
        Live(console=console, screen=True, auto_refresh=False) as live,
        _keys_of_terminal() as wait,
    ):
        key = None
        while key != "q":
            states = [watch.state for watch in watches]
            live.update(draw(states, dict(actions.messages)), refresh=True)
            key = wait(_REDRAW)
            actions.start(key)


class _Actions:
    """The operator's actions, each on a thread: a pause takes as long as the running requests.

    Attributes:
        messages: the latest of each server.
    """

    def __init__(self, watches: Sequence[ServerWatch]) -> None:
        self._watches = watches
        self.messages: dict[str, str] = {}

    def start(self, key: str | None) -> None:
        """Start what a key stands for on all servers that take actions."""
        for watch in self._watches:
            actions: dict[str | None, tuple[str, Callable[[], str]]] = {
                "p": ("pausing; running requests finish", watch.pause),
                "r": ("resuming", watch.resume),
                "l": ("reloading the policy", watch.reload),
            }
            if key in actions and watch.state.open:
                message, action = actions[key]
                url = watch.state.url
                self.messages[url] = message
                threading.Thread(target=self._run, args=(url, action), daemon=True).start()

    def _run(self, url: str, action: Callable[[], str]) -> None:
        from vllm_semantic_sched.operate.client import AdminError

        try:
            self.messages[url] = action()
        except AdminError as error:
            self.messages[url] = f"refused: {error}"


@contextmanager
def _keys_of_terminal() -> Iterator[Callable[[float], str | None]]:
    """Reads single keys while a `with` block lasts: the value waits so many seconds for the next
    one, and gives None if none is pressed."""
    saved = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def wait(seconds: float) -> str | None:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return None
        # Not through sys.stdin: select does not see what Python has buffered.
        key = os.read(sys.stdin.fileno(), 1)
        return key.decode(errors="replace").lower() or "q"  # nothing: the terminal is gone

    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
