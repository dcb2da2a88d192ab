"""Reads the body of an HTTP request ahead of the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_PATHS = ("/completions", "/responses")


def asks_for_completion(scope: Any) -> bool:
    """Whether an ASGI scope is a request for generated text."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.endswith(_PATHS)


async def read_body(receive: Receive) -> tuple[bytes, Message | None]:
    """The whole body, and the message of a disconnect if the client left before it was complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), None


def replayed(body: bytes, ending: Message | None, receive: Receive) -> Receive:
    """A channel on which the application receives what `read_body` returned, then the rest."""
    first: list[Message] = [ending or {"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
