"""What becomes of requests when the server is told to stop.

vLLM lets the engine finish its requests (`--shutdown-timeout`), but takes new ones that it cannot
tokenize any more, kills the engine at the deadline, and leaves the requests that were in it without
an answer.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from vllm_semantic_sched.engine.guard import logged
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.engine.vllm_api import end_requests

# The last part of the time is for the engine: its workers free the device, then the event log is
# closed. At most so many seconds, and this share of the time.
_LONGEST_CLOSE = 10.0
_CLOSE_SHARE = 1 / 3


def watch_stop(engine_client: Any, state: ServerState) -> None:
    """Note in `state` when vLLM stops the engines, and end the requests that are not done shortly
    before its deadline. To be called in the server's event loop."""
    shutdown = engine_client.shutdown
    loop = asyncio.get_running_loop()

    def end_all() -> None:
        with logged("requests may wait for the server that stops"):
            end_requests(engine_client)

    def soon(call: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(call, *args)

    def stop(*args: Any, timeout: float | None = None) -> None:
        """Runs in a thread of its own, and waits for the engines."""
        state.stopping = True
        if timeout:
            patience = timeout - min(_LONGEST_CLOSE, _CLOSE_SHARE * timeout)
            soon(loop.call_later, patience, end_all)
        shutdown(*args, timeout=timeout)
        soon(end_all)

    engine_client.shutdown = stop
