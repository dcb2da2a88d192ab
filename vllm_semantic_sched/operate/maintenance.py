"""Pauses a running server, changes its model, and resumes it. Queued requests survive."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, Literal

from vllm_semantic_sched.operate.client import AdminClient, AdminError

POLL_SECONDS = 0.5
"""Time between two reports of progress."""

Change = Literal["sleep", "reload-weights", "load-lora", "unload-lora"]


def pause(
    server: AdminClient,
    keep: bool,  # freeze running requests instead of waiting for them
    patience: float,  # seconds after which requests that still run are frozen
    report: Callable[[str], None],  # gets the present phase, `pausing` or `paused`
    lease: float = 3600.0,  # seconds after which the server resumes by itself
) -> None:
    """Let nothing new start and wait until the running requests have finished. AdminError if the
    server refuses."""
    deadline = time.monotonic() + patience
    paused: Future[Any] = Future()

    def post() -> None:
        try:
            mode = "keep" if keep else "wait"
            paused.set_result(server.post("/pause", mode=mode, seconds=lease))
        except Exception as error:
            paused.set_exception(error)

    Thread(target=post, daemon=True).start()
    froze = keep
    while paused not in wait([paused], POLL_SECONDS).done:
        report("pausing")
        if time.monotonic() >= deadline and not froze:
            froze = True
            server.post("/pause", mode="keep", seconds=lease)
    paused.result()
    report("paused")


def abandon_pause(server: AdminClient) -> None:
    """Resume a server whose pause may still wait for running requests. AdminError if it refuses."""
    server.post("/pause", mode="keep")  # vLLM resumes only from a pause that is complete
    server.post("/resume")


def change(
    server: AdminClient,
    action: Change,
    *,
    level: int = 1,  # of sleep, see vLLM
    lora_name: str | None = None,
    lora_path: str | None = None,  # absolute folder of the adapter
    in_place: bool = False,  # replace the adapter of that name
) -> float:
    """Change the model of a paused server, and resume it unless it goes to sleep. Returns the
    seconds that the change took. AdminError if it failed; the server resumes then unless it may
    hold a mix of weights."""
    start = time.monotonic()
    # Both caches may hold results of the old weights: adapters are known by name alone.
    replaces, changing = action == "reload-weights" or in_place, False
    try:
        if replaces:
            server.post("/caches/drop")
        changing = True
        if action == "sleep":
            server.post("/sleep", level=level)
        elif action == "reload-weights":
            server.post("/weights/reload")
        else:
            adapter: dict[str, object] = {"lora_name": lora_name}
            if action == "load-lora":
                adapter |= {"lora_path": lora_path, "load_inplace": in_place}
            server.call("POST", f"/{action.replace('-', '_')}_adapter", adapter, prefix="/v1")
    except AdminError as error:
        if replaces and changing:
            raise AdminError(
                f"{error}\nThe server stays paused, because it may hold a part of the new "
                "weights. Try again, or resume it with --action resume."
            ) from error
        server.post("/resume")
        raise
    seconds = time.monotonic() - start
    if action != "sleep":
        server.post("/resume")
    return seconds
