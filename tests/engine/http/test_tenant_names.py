"""Tenant names from HTTP requests in `vllm_xargs`."""

import asyncio
import json

import pytest

from vllm_semantic_sched.engine.http.tenant_names import TenantNames

pytestmark = pytest.mark.engine


def pass_through(body, headers=(), path="/v1/chat/completions", pieces=1, leave=False):
    """Scope and body that the application behind the middleware receives."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = max(1, -(-len(raw) // pieces))
    parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": leave or number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    if leave:
        messages.append({"type": "http.disconnect"})
    seen = {}

    async def receive():
        return messages.pop(0)

    async def app(scope, receive, send):
        got, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            got += message.get("body", b"")
            seen["last"] = message["type"]
        seen.update(scope=scope, body=got)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", str(len(raw)).encode()), *headers],
    }
    asyncio.run(TenantNames(app)(scope, receive, None))
    return seen


HEADER = ((b"x-semsched-tenant", b"gateway"),)


@pytest.mark.parametrize(
    ("body", "headers", "tenant"),
    [
        ({"user": "acme"}, (), "acme"),
        ({"user": "acme", "vllm_xargs": {"urgency": 1}}, (), "acme"),
        ({"user": "acme", "vllm_xargs": {"tenant": "own"}}, (), "own"),
        ({"user": "acme", "vllm_xargs": {"tenant": "own"}}, HEADER, "gateway"),
        ({"vllm_xargs": None}, HEADER, "gateway"),
        ({"prompt": "no tenant"}, (), None),
        ({"user": 7}, (), None),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_header_overrides_xargs_and_xargs_overrides_user(body, headers, tenant, pieces) -> None:
    seen = pass_through(body, headers, pieces=pieces)
    received = json.loads(seen["body"])
    assert (received.get("vllm_xargs") or {}).get("tenant") == tenant
    assert dict(seen["scope"]["headers"])[b"content-length"] == str(len(seen["body"])).encode()
    others = {key: value for key, value in received.items() if key != "vllm_xargs"}
    assert others == {key: value for key, value in body.items() if key != "vllm_xargs"}
    if "urgency" in (body.get("vllm_xargs") or {}):
        assert received["vllm_xargs"]["urgency"] == 1


@pytest.mark.parametrize("body", [b'{"user": broken', b'["user"]', b"", b'{"vllm_xargs": 3}'])
def test_bodies_that_are_not_requests_pass_unchanged(body) -> None:
    assert pass_through(body, HEADER)["body"] == body


def test_other_paths_and_disconnects_pass_unchanged() -> None:
    body = {"user": "acme"}
    assert json.loads(pass_through(body, path="/v1/embeddings")["body"]) == body
    assert pass_through(body, leave=True)["last"] == "http.disconnect"
