"""What headers and bodies say of a request reaches the engine by every route."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched.engine.http.dispatch import Dispatch
from vllm_semantic_sched.engine.http.incoming import ServerState, incoming
from vllm_semantic_sched.engine.http.middleware import Refusals, watch
from vllm_semantic_sched.engine.http.preparation import GlanceRules, UrgentFirst
from vllm_semantic_sched.policy.config import parse_policy

pytestmark = pytest.mark.engine

RULES = GlanceRules(parse_policy({}), None)
HEADER = ((b"x-semsched-tenant", b"gateway"),)


class Server:
    """Hands each body's `vllm_xargs` to a fake engine, as vLLM's routes do."""

    def __init__(self) -> None:
        self.given: list[SamplingParams] = []
        self.bodies: list[bytes] = []
        self.state = SimpleNamespace(semsched=ServerState(rules=RULES), engine_client=self)

    async def generate(self, prompt, sampling_params, request_id):
        self.given.append(sampling_params)
        return
        yield

    async def app(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            body += message.get("body", b"")
        self.bodies.append(body)
        if message["type"] == "http.disconnect":
            return
        extra = json.loads(body).get("vllm_xargs")
        params = SamplingParams(extra_args=extra)
        async for _ in self.state.engine_client.generate("", params, scope.get("id", "id")):
            pass

    def post(self, body, headers=(), path="/v1/chat/completions", pieces=1, leave=False, **more):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = max(1, -(-len(raw) // pieces))
        parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        messages = [
            {"type": "http.request", "body": part, "more_body": leave or number < len(parts)}
            for number, part in enumerate(parts, start=1)
        ]
        if leave:
            messages.append({"type": "http.disconnect"})

        async def receive():
            return messages.pop(0)

        async def send(message):
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": list(headers),
            "app": self,
            **more,
        }
        asyncio.run(Refusals(UrgentFirst(self.app))(scope, receive, send))


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
    server = Server()
    server.post(body, headers, pieces=pieces)
    (params,) = server.given
    assert (params.extra_args or {}).get("tenant") == tenant
    assert json.loads(server.bodies[0]) == body, "the body itself is not touched"
    if "urgency" in (body.get("vllm_xargs") or {}):
        assert params.extra_args["urgency"] == 1


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/invocations", "/v1/chat/completions/batch", "/a/route/to/come"]
)
def test_header_of_the_gateway_wins_on_every_route(path) -> None:
    server = Server()
    server.post({"vllm_xargs": {"tenant": "somebody else"}}, HEADER, path)
    assert server.given[0].extra_args["tenant"] == "gateway"


@pytest.mark.parametrize("body", [b'{"user": broken', b'["user"]', b"", b"[" * 20_000])
def test_bodies_that_are_not_requests_pass_unchanged(body) -> None:
    server = Server()
    with pytest.raises((ValueError, AttributeError, RecursionError)):  # of the application
        server.post(body, HEADER)
    assert server.bodies == [body]


def test_disconnect_is_passed_on() -> None:
    server = Server()
    server.post({"user": "acme"}, leave=True)
    assert not server.given and incoming.get() is None


def test_id_that_a_client_chose_is_bounded() -> None:
    server = Server()
    server.post({}, id="a" * 512)
    with pytest.raises(ValueError, match="request_id: 4000000 characters"):
        server.post({}, id="a" * 4_000_000)
    assert len(server.given) == 1


def test_parameters_that_cannot_carry_a_tenant_are_left_alone() -> None:
    server = Server()
    watch(server)
    assert callable(Dispatch(server).prepare(("", None, "id"), {}))
