"""Pause a running server, change its model, and resume it; queued requests survive.

No new request starts, and running requests finish (or freeze, with --running keep). Then the
change is made and the server resumes. Requests that wait, and those that arrive meanwhile, stay
in the queue.
"""

import argparse
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from vllm_semantic_sched.cli.arguments import Failure, add_server_arguments
from vllm_semantic_sched.operate.client import AdminClient, AdminError, abandon_pause

POLL_SECONDS = 0.5  # between two reports of progress
_ACTIONS = ("pause", "resume", "sleep", "wake", "reload-weights", "load-lora", "unload-lora")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions, and of each the server and the options that apply to it."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=text, allow_abbrev=False)
        add_server_arguments(parser)
        return parser

    pause = action("pause", "let no new request start, until resume or the end of the lease")
    _add_pause_arguments(pause)
    action("resume", "end a pause")
    sleep = action("sleep", "pause, and free the accelerator's memory, until wake")
    _add_pause_arguments(sleep)
    sleep.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="vLLM's sleep level: 1 keeps the weights on the host, 2 drops them (default: 1)",
    )
    action("wake", "end a sleep, and resume")
    reload_weights = action(
        "reload-weights", "load the weights again from where the server got them, and resume"
    )
    _add_pause_arguments(reload_weights)
    load = action("load-lora", "load a LoRA adapter, and resume")
    unload = action("unload-lora", "unload a LoRA adapter, and resume")
    for lora in (load, unload):
        _add_pause_arguments(lora)
        lora.add_argument("--lora-name", metavar="NAME", required=True, help="name of the adapter")
    load.add_argument(
        "--lora-path", type=Path, metavar="DIR", required=True, help="folder of the adapter"
    )
    load.add_argument(
        "--in-place", action="store_true", help="replace the adapter of that name, if it is loaded"
    )


def _add_pause_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the actions that pause the server."""
    add = parser.add_argument
    add(
        "--running",
        choices=("finish", "keep"),
        default="finish",
        help="let running requests finish, or freeze them (default: finish)",
    )
    add(
        "--patience",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="freeze requests that still run after this time (default: wait for all)",
    )
    add(
        "--lease",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="the pause ends by itself after this time (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> None:
    """Carry out an action; 1 if it failed."""
    action = args.action
    server = AdminClient(args.server, args.api_key)
    for number in _INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    asleep = False
    ends_pause = False  # if this command is interrupted
    try:
        if action in ("resume", "wake"):
            server.post(f"/{action}")
            return _report(server, "resumed")
        found_paused = any(engine["paused"] for engine in server.status())
        ends_pause = not found_paused
        _pause(server, args)
        if action != "pause":
            with _interrupts_held():
                change = _change(server, args, found_paused)
                asleep = action == "sleep"
            phase = "resumed"
            if not asleep:
                print(f"{action}: done in {change.seconds:.1f} s")
            elif change.answer.get("asleep") == 0:
                print("sleep: vLLM has no sleep mode on this platform, no memory was released")
                phase = "paused"
            else:
                phase = "asleep"
            _report(server, phase)
    except KeyboardInterrupt:
        # A server must not stay paused because this command was ended.
        if ends_pause and not asleep:
            abandon_pause(server)
        raise
    except AdminError as error:
        raise Failure(f"{action}: {error}") from error


def _report(server: AdminClient, phase: str) -> None:
    engines = server.status()
    running = sum(engine["running"] for engine in engines)
    waiting = sum(engine["waiting"] for engine in engines)
    print(f"{phase}: {running} running, {waiting} waiting", flush=True)


def _pause(server: AdminClient, args: argparse.Namespace) -> None:
    """Let nothing new start and wait until the running requests have finished or are frozen."""
    deadline = time.monotonic() + args.patience
    froze = args.running == "keep"
    mode = "keep" if froze else "wait"
    paused: Future[Any] = Future()

    def post() -> None:
        try:
            paused.set_result(server.post("/pause", mode=mode, seconds=args.lease))
        except Exception as error:
            paused.set_exception(error)

    Thread(target=post, daemon=True).start()
    while paused not in wait([paused], POLL_SECONDS).done:
        _report(server, "pausing")
        if time.monotonic() >= deadline and not froze:
            froze = True
            server.post("/pause", mode="keep", seconds=args.lease)
    paused.result()
    _report(server, "paused")


class _Change(NamedTuple):
    """A change that was made."""

    seconds: float  # that it took
    answer: dict[str, Any]  # of the server


def _change(server: AdminClient, args: argparse.Namespace, found_paused: bool) -> _Change:
    """Change the model of the paused server, and resume it unless it goes to sleep. If it failed,
    the server resumes unless it may hold a mix of weights, or was paused before."""
    start = time.monotonic()
    # Both caches may hold results of the old weights: adapters are known by name alone.
    replaces = args.action == "reload-weights" or (args.action == "load-lora" and args.in_place)
    changing = False
    try:
        if replaces:
            server.post("/caches/drop")
        changing = True
        if args.action == "sleep":
            answer = server.post("/sleep", level=args.level)
        elif args.action == "reload-weights":
            answer = server.post("/weights/reload")
        else:
            adapter = {"lora_name": args.lora_name}
            if args.action == "load-lora":
                path = str(args.lora_path.resolve())
                adapter |= {"lora_path": path, "load_inplace": args.in_place}
            route = f"/{args.action.replace('-', '_')}_adapter"
            answer = server.call(route, adapter, prefix="/v1")
    except AdminError as error:
        if replaces and changing:
            raise AdminError(
                f"{error}\nThe server stays paused, because it may hold a part of the new "
                "weights. Try again, or resume it with semsched maintenance resume."
            ) from error
        if found_paused:
            raise AdminError(
                f"{error}\nThe server stays paused, as it was before. Resume it with semsched "
                "maintenance resume (wake, if it sleeps)."
            ) from error
        server.post("/resume")
        raise
    seconds = time.monotonic() - start
    if args.action != "sleep":
        server.post("/resume")
    return _Change(seconds, answer)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets an interrupt take effect after the block: half of a change must not be served."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)

    former = {number: signal.signal(number, note) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
