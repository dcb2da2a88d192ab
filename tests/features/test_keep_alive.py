"""Signs of life in silent streams (`--sse-keep-alive-interval` of vLLM), and refusals."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from vllm.entrypoints.serve.utils.sse_keep_alive import (
    SSE_KEEP_ALIVE_COMMENT,
    with_sse_keep_alive,
)

from vllm_semantic_sched.engine.http.middleware import Refusals, RequestRefused
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

LATE = Refusal(Code.QUEUE_TIMEOUT, "it waited too long", 3.0)
SIGN = SSE_KEEP_ALIVE_COMMENT.encode()
OFTEN, NEVER = 0.01, 600.0  # seconds between two signs
SIGNS = 2  # that the client sees before the engine goes on


class Engine:
    """Gives an answer's tokens; None: it is silent until the client has seen signs of life."""

    def __init__(self, *outputs: str | Refusal | None) -> None:
        self.outputs = outputs
        self.waited_for = asyncio.Event()

    async def generate(self) -> Any:
        for output in self.outputs:
            if output is None:
                self.waited_for.clear()
                await self.waited_for.wait()
                continue
            stop_reason = output.to_text() if isinstance(output, Refusal) else None
            finish_reason = "error" if isinstance(output, Refusal) else None
            answer = SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)
            yield SimpleNamespace(outputs=[answer])


async def events(engine: Engine) -> Any:
    """As vLLM's routes stream an answer."""
    try:
        async for _ in engine.generate():
            yield "data: {}\n\n"
    except RequestRefused as error:
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
    yield "data: [DONE]\n\n"


def answer(interval: float, *outputs: str | Refusal | None) -> tuple[int, list[bytes]]:
    """What a client receives: the status and the parts of the body, less those that are empty."""
    engine = Engine(*outputs)
    sent: list[dict[str, Any]] = []
    signs = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        content = with_sse_keep_alive(events(engine), interval)
        await StreamingResponse(content, media_type="text/event-stream")(scope, receive, send)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        nonlocal signs
        sent.append(message)
        signs += message.get("body") == SIGN
        if signs >= SIGNS:
            signs = 0
            engine.waited_for.set()

    state = SimpleNamespace(engine_client=engine)
    scope = {"type": "http", "method": "POST", "app": SimpleNamespace(state=state)}
    asyncio.run(Refusals(app)(scope, receive, send))
    return sent[0]["status"], [message["body"] for message in sent[1:] if message["body"]]


def test_stream_that_waits_is_not_silent() -> None:
    """Before its first token, and between two: held, or preempted."""
    status, parts = answer(OFTEN, None, "first", None, "second")
    assert status == 200
    assert [part for part in parts if part != SIGN] == [b"data: {}\n\n"] * 2 + [b"data: [DONE]\n\n"]
    token = parts.index(b"data: {}\n\n")
    assert parts[:SIGNS] == [SIGN] * SIGNS
    assert parts[token + 1 : token + 1 + SIGNS] == [SIGN] * SIGNS


def test_refusal_before_the_first_sign_has_its_status() -> None:
    status, parts = answer(NEVER, LATE)
    assert status == 408
    assert [json.loads(part) for part in parts] == [LATE.body()]


def test_refusal_after_a_sign_ends_the_stream_with_its_code() -> None:
    status, parts = answer(OFTEN, None, LATE)
    assert status == 200 and parts[:SIGNS] == [SIGN] * SIGNS
    event, done = [part for part in parts if part != SIGN]
    assert json.loads(event.removeprefix(b"data: ")) == LATE.body()
    assert done == b"data: [DONE]\n\n"
