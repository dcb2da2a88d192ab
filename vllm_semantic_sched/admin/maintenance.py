"""`semsched maintenance`: stop, change the model, go on; queued requests survive.

Nothing new starts, running requests finish (or are frozen, with --running keep), the change is
made, everything goes on. Requests that wait, and those that come meanwhile, stay in the queue.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_semantic_sched.admin.client import AdminClient, AdminError, add_server_arguments

_ACTIONS = ("pause", "resume", "sleep", "wake", "reload-weights", "load-lora", "unload-lora")
_POLL_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_server_arguments(parser)
    parser.add_argument(
        "--action",
        choices=_ACTIONS,
        required=True,
        help="pause and sleep end with a server that stands still, until resume or wake; the "
        "others go on by themselves",
    )
    parser.add_argument(
        "--running",
        choices=("finish", "keep"),
        default="finish",
        help="let running requests finish, or freeze them where they are (default: finish)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="freeze what still runs after that long (default: wait until it has finished)",
    )
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="of sleep")
    parser.add_argument("--lora-name", help="of load-lora and unload-lora")
    parser.add_argument("--lora-path", type=Path, help="of load-lora")
    parser.add_argument(
        "--in-place", action="store_true", help="load-lora: replace the adapter of that name"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out an action; 1 if it failed, with the state that the server is left in."""
    if args.action.endswith("lora") and not args.lora_name:
        print(f"{args.action} needs --lora-name", file=sys.stderr)
        return 2
    if args.action == "load-lora" and args.lora_path is None:
        print("load-lora needs --lora-path", file=sys.stderr)
        return 2
    server = AdminClient(args.server, args.api_key)
    try:
        if args.action in ("resume", "wake"):
            server.post(f"/{args.action}")
            _show(server, "going on")
            return 0
        _pause(server, args.running, args.patience)
        if args.action == "pause":
            return 0
        return _change(server, args)
    except AdminError as error:
        print(f"{args.action}: {error}", file=sys.stderr)
        return 1


def _pause(server: AdminClient, running: str, patience: float) -> None:
    """Wait until nothing runs, showing progress. An interrupt lets the server go on."""
    deadline = time.monotonic() + patience
    mode = "wait" if running == "finish" else "keep"
    try:
        paused = _Background(lambda: server.post("/pause", mode=mode))
        while not paused.wait(_POLL_SECONDS):
            _show(server, "pausing")
            if time.monotonic() >= deadline and mode == "wait":
                mode = "keep"
                server.post("/pause", mode=mode)
        paused.result()
    except KeyboardInterrupt:
        server.post("/pause", mode="keep")  # vLLM resumes only from a pause that is complete
        server.post("/resume")
        raise
    _show(server, "paused")


def _change(server: AdminClient, args: argparse.Namespace) -> int:
    begin = time.monotonic()
    replaces = args.action == "reload-weights" or args.in_place
    begun = False
    try:
        if replaces:  # caches know neither weights nor, but by name, adapters
            server.post("/caches/drop")
        begun = True
        if args.action == "sleep":
            server.post("/sleep", level=args.level)
            _show(server, "asleep")
            return 0
        if args.action == "reload-weights":
            server.post("/weights/reload")
        elif args.action == "load-lora":
            _load_adapter(server, args)
        else:
            body = {"lora_name": args.lora_name}
            server.call("POST", "/unload_lora_adapter", body, prefix="/v1")
    except AdminError as error:
        if replaces and begun:
            raise AdminError(
                f"{error}\nThe server stays paused, as it may hold half of the new weights. Try "
                "again, or go on with --action resume."
            ) from error
        server.post("/resume")
        raise
    print(f"{args.action}: done in {time.monotonic() - begin:.1f} s")
    server.post("/resume")
    _show(server, "going on")
    return 0


def _load_adapter(server: AdminClient, args: argparse.Namespace) -> None:
    body = {
        "lora_name": args.lora_name,
        "lora_path": str(args.lora_path.resolve()),
        "load_inplace": args.in_place,
    }
    server.call("POST", "/load_lora_adapter", body, prefix="/v1")


def _show(server: AdminClient, doing: str) -> None:
    engines = server.status()
    running, waiting = (sum(engine[name] for engine in engines) for name in ("running", "waiting"))
    print(f"{doing}: {running} running, {waiting} waiting", flush=True)


class _Background:
    """A call that goes on while its progress is shown."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None
        self._call = call
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def result(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error
        self._done.set()
