"""Passes the tenant of an HTTP request to the scheduler.

vLLM's engine core sees neither headers nor the `user` field of an OpenAI request, but it sees
`vllm_xargs`, so the tenant's name is copied there.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_semantic_sched.engine.http.body import asks_for_completion, read_body, replayed

App = Callable[[Any, Any, Any], Awaitable[None]]

# Set by a gateway that has authenticated the client.
TENANT_HEADER = b"x-semsched-tenant"


class TenantNames:
    """ASGI middleware that sets `vllm_xargs.tenant` from the header `X-Semsched-Tenant`, else from
    the body's `user`.

    The header overrides a tenant in `vllm_xargs`, which overrides `user`. A body that is not a
    JSON object passes unchanged, and vLLM rejects it.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not asks_for_completion(scope):
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(TENANT_HEADER)
        body, ending = await read_body(receive)
        if ending is None and (header is not None or b'"user"' in body):
            body = name_tenant(body, None if header is None else header.decode("latin-1"))
            kept = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
            scope = {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
        await self._app(scope, replayed(body, ending, receive), send)


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
    given = request.get("vllm_xargs")
    extra = tenant_arguments(given, request.get("user"), header)
    return body if extra is given else json.dumps({**request, "vllm_xargs": extra}).encode()


def tenant_arguments(extra: Any, user: Any, header: str | None) -> Any:
    """The `vllm_xargs` of a request with its tenant; the object itself if there is none.

    Args:
        user: of the OpenAI request.
        header: value of the tenant header; None if absent.
    """
    known = {} if extra is None else extra
    tenant = header
    if tenant is None and isinstance(known, dict) and "tenant" not in known:
        tenant = user
    if not isinstance(tenant, str) or not isinstance(known, dict):
        return extra
    return {**known, "tenant": tenant}
