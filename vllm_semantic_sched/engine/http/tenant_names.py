"""Passes the tenant of an HTTP request to the scheduler.

vLLM's engine core sees neither headers nor the `user` field of an OpenAI request, but it sees
`vllm_xargs`, so the tenant's name is copied there.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Any], Awaitable[None]]

# Set by a gateway that has authenticated the client.
TENANT_HEADER = b"x-semsched-tenant"

_PATHS = ("/completions", "/responses")


class TenantNames:
    """ASGI middleware that sets `vllm_xargs.tenant` from the header `X-Semsched-Tenant`, else from
    the body's `user`.

    The header overrides a tenant in `vllm_xargs`, which overrides `user`. A body that is not a
    JSON object passes unchanged, and vLLM rejects it.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or not scope["path"].endswith(_PATHS)
        ):
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(TENANT_HEADER)
        body, ending = await _read(receive)
        if ending is None and (header is not None or b'"user"' in body):
            body = name_tenant(body, None if header is None else header.decode("latin-1"))
            kept = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
            scope = {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        if ending is not None:
            first = [ending]

        async def replay() -> Message:
            return first.pop(0) if first else await receive()

        await self._app(scope, replay, send)


def name_tenant(body: bytes, header: str | None) -> bytes:
    """The body of an OpenAI request with its tenant in `vllm_xargs`; unchanged if it has no tenant.

    Args:
        header: value of the tenant header; None if absent.
    """
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict):
        return body
    extra = request.get("vllm_xargs")
    extra = {} if extra is None else extra
    tenant = header
    if tenant is None and isinstance(extra, dict) and "tenant" not in extra:
        tenant = request.get("user")
    if not isinstance(tenant, str) or not isinstance(extra, dict):
        return body
    return json.dumps({**request, "vllm_xargs": {**extra, "tenant": tenant}}).encode()


async def _read(receive: Any) -> tuple[bytes, Message | None]:
    """The whole body, and the message of a disconnect if the client left before it was complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), None
