"""CPU time of HTTP requests with our middleware and without it, in turn, and the longest time for
which one callback holds the event loop.

The application is FastAPI with vLLM's model of a chat request; the engine answers at once. Times
are CPU time of the thread. The bodies: a short chat, one of 16 KiB, and the largest that are read
ahead, 256 KiB in one text or in 4,000.

    python scripts/studies/door_cost.py --repeats 200
"""

import argparse
import asyncio
import json
import statistics
import time
from asyncio.events import Handle
from types import SimpleNamespace
from typing import Any

from common import main
from fastapi import FastAPI, Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched import Middleware
from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.engine.http.preparation import LARGEST_BODY, PreviewRules
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config import Policy

PATH = "/v1/chat/completions"


def bodies() -> dict[str, bytes]:
    """Chats by name."""

    def chat(content: object) -> bytes:
        messages = [{"role": "user", "content": content}]
        return json.dumps({"model": "m", "messages": messages, "max_tokens": 8}).encode()

    parts: Any = [{"type": "text", "text": f"he {n} is not breathing"} for n in range(4000)]
    worst = chat(parts)
    assert 0.7 * LARGEST_BODY < len(worst) <= LARGEST_BODY, len(worst)
    return {
        "short": chat("My father has collapsed and is not breathing."),
        "16 KiB": chat("My father has collapsed and is not breathing. " * 350),
        "256 KiB of text": chat("My father has collapsed and is not breathing. " * 5600),
        "256 KiB of parts": worst,
    }


class Engine:
    """Answers at once."""

    async def generate(self, prompt: str, params: SamplingParams, request_id: str) -> Any:
        """One output."""
        yield None


def make_app(ours: bool) -> FastAPI:
    """An application with one route."""
    app = FastAPI()

    @app.post(PATH)
    async def answer(request: Request) -> dict[str, str]:
        ChatCompletionRequest.model_validate_json(await request.body())
        async for _ in app.state.engine_client.generate("", SamplingParams(), "id"):
            pass
        return {"answer": "done"}

    app.state.engine_client = Engine()
    parallel = SimpleNamespace(
        data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
    )
    app.state.vllm_config = SimpleNamespace(parallel_config=parallel)
    if ours:
        app.state.semsched = ServerState(rules=PreviewRules.of(Policy()), routes=True)
        app.add_middleware(Middleware)
    return app


async def post(app: FastAPI, body: bytes) -> None:
    """Send a request in pieces of 64 KiB, as uvicorn receives them."""
    pieces = [body[start : start + 2**16] for start in range(0, len(body), 2**16)]
    messages = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]
    statuses = []

    async def receive() -> Any:
        await asyncio.sleep(0)
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "app": app}
    await app(scope | {"query_string": b"", "root_path": ""}, receive, send)
    assert statuses[0] == 200, statuses


def measure(apps: dict[str, FastAPI], body: bytes, repeats: int) -> dict[str, tuple[float, float]]:
    """By application: median CPU seconds of a request, and the longest of a callback (the median
    over requests)."""
    longest = 0.0
    run = Handle._run

    def timed(handle: Handle) -> None:
        nonlocal longest
        begin = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - begin)

    totals: dict[str, list[tuple[float, float]]] = {name: [] for name in apps}

    async def all_requests() -> None:
        nonlocal longest
        for _ in range(repeats + 3):
            for name, app in apps.items():
                longest = 0.0
                begin = time.thread_time()
                await asyncio.create_task(post(app, body))
                totals[name].append((time.thread_time() - begin, longest))

    Handle._run = timed  # type: ignore[method-assign]
    try:
        asyncio.run(all_requests())
    finally:
        Handle._run = run  # type: ignore[method-assign]
    return {
        name: tuple(statistics.median(column) for column in zip(*times[3:], strict=True))
        for name, times in totals.items()
    }  # type: ignore[return-value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--repeats", type=int, default=100, help="of each request (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    apps = {"stock": make_app(ours=False), "ours": make_app(ours=True)}
    columns = ("body", "bytes", "request, stock", "ours", "longest callback, stock", "ours")
    table = make_table("CPU time of the HTTP server, ms", *columns, words=1)
    for name, body in bodies().items():
        times = measure(apps, body, args.repeats)
        cells = [times[app][column] * 1e3 for column in (0, 1) for app in apps]
        table.add_row(name, str(len(body)), *(f"{cell:.2f}" for cell in cells))
    make_console().print(table)
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
