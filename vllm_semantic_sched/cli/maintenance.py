"""Pause a running server, change its model, and resume it; queued requests survive.

No new request starts, and running requests finish (or freeze, with --running keep). Then the
change is made and the server resumes. Requests that wait, and those that arrive meanwhile, stay
in the queue.
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_semantic_sched.cli.arguments import Failure, add_server_arguments
from vllm_semantic_sched.operate import maintenance
from vllm_semantic_sched.operate.client import AdminClient, AdminError

_ACTIONS = ("pause", "resume", "sleep", "wake", "reload-weights", "load-lora", "unload-lora")
_COUNTS = ("running", "waiting")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add = parser.add_argument
    text = "pause and sleep leave the server paused until resume or wake; the other actions resume "
    text += "it"
    add("--action", choices=_ACTIONS, required=True, help=text)
    text = "let running requests finish, or freeze them (default: finish)"
    add("--running", choices=("finish", "keep"), default="finish", help=text)
    text = "freeze requests that still run after this time (default: wait for all)"
    add("--patience", type=float, default=float("inf"), metavar="SECONDS", help=text)
    text = "the server resumes by itself after this time (default: %(default)g)"
    add("--lease", type=float, default=3600.0, metavar="SECONDS", help=text)
    add("--level", type=int, choices=(1, 2), default=1, help="sleep: the level")
    add("--lora-name", help="load-lora, unload-lora: name of the adapter")
    add("--lora-path", type=Path, help="load-lora: folder of the adapter")
    add("--in-place", action="store_true", help="load-lora: replace the adapter of that name")


def run(args: argparse.Namespace) -> None:
    """Carry out an action; 1 if it failed, 2 if an option is missing."""
    action = args.action
    needed = {"load-lora": ("lora_name", "lora_path"), "unload-lora": ("lora_name",)}
    for name in needed.get(action, ()):
        if not getattr(args, name):
            raise Failure(f"{action} needs --{name.replace('_', '-')}", 2)
    server = AdminClient(args.server, args.api_key)
    for number in _INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    asleep = False

    def report(phase: str) -> None:
        engines = server.status()
        counts = (f"{sum(engine[key] for engine in engines)} {key}" for key in _COUNTS)
        print(f"{phase}: {', '.join(counts)}", flush=True)

    try:
        if action in ("resume", "wake"):
            server.post(f"/{action}")
            return report("resumed")
        maintenance.pause(server, args.running == "keep", args.patience, report, args.lease)
        if action != "pause":
            with _interrupts_held():
                seconds = maintenance.change(
                    server,
                    action,
                    level=args.level,
                    lora_name=args.lora_name,
                    lora_path=None if args.lora_path is None else str(args.lora_path.resolve()),
                    in_place=args.in_place,
                )
                asleep = action == "sleep"
            if not asleep:
                print(f"{action}: done in {seconds:.1f} s")
            report("asleep" if asleep else "resumed")
    except KeyboardInterrupt:
        # A server must not stay paused because this command was ended.
        if not asleep:
            maintenance.abandon_pause(server)
        raise
    except AdminError as error:
        raise Failure(f"{action}: {error}") from error


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets an interrupt take effect after the block: half of a change must not be served."""
    came: list[int] = []
    former = {n: signal.signal(n, lambda number, _: came.append(number)) for n in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
