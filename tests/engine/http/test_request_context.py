"""What headers and bodies say of a request reaches the engine by every route."""

import asyncio
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, UsageInfo
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.exceptions import GenerationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched.engine.http.dispatch import Dispatch
from vllm_semantic_sched.engine.http.middleware import Refusals, RequestRefused, watch
from vllm_semantic_sched.engine.http.preparation import PreviewRules, UrgentFirst
from vllm_semantic_sched.engine.http.request_context import ServerState, incoming
from vllm_semantic_sched.engine.vllm_api import is_beam
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

RULES = PreviewRules(parse_policy({}), None)
TIERS = {
    "levels": 2,
    "default_level": 1,
    "tiers": [
        {"name": "first", "service_tier": "priority"},
        {"name": "second", "service_tier": "default"},
    ],
}
QUOTED = 'the field "service_tier":null of an answer'
SESSION_HEADER = ((b"x-session-id", b"chat-7"),)
HEADER = ((b"x-semsched-tenant", b"gateway"),)


class Server:
    """Hands each body's `vllm_xargs` to a fake engine, as vLLM's routes do."""

    def __init__(self, policy=None) -> None:
        self.sent: list[dict] = []
        self.status = 200
        self.reply: dict = {"choices": [{"text": QUOTED}], "service_tier": None, "usage": 1}
        self.given: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.bodies: list[bytes] = []
        self.state = SimpleNamespace(semsched=ServerState(rules=RULES), engine_client=self)
        if policy is not None:
            self.state.semsched.rules = PreviewRules(parse_policy(policy), None)

    async def generate(self, prompt, sampling_params, request_id, priority=0):
        self.given.append(sampling_params)
        self.priorities.append(priority)
        return
        yield

    async def search(self, scope, receive, send):
        """Answers with two beams of two tokens, whose parameters vLLM makes itself."""
        await receive()
        params = SamplingParams(max_tokens=1)
        for _ in range(2):
            for beam in range(2):
                name = f"id-0123456789abcdef-beam-{beam}"
                async for _ in self.state.engine_client.generate("", params, name):
                    pass

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

    async def answer(self, scope, receive, send):
        """Answers as vLLM does, after the engine."""
        await self.app(scope, receive, send)
        body = json.dumps(self.reply, separators=(",", ":")).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, scope, receive, send):
        await self.app(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, False):
            chunk = {"type": "http.response.body", "body": b"data: {}", "more_body": more}
            await send(chunk)

    def post(
        self,
        body,
        headers=(),
        path="/v1/chat/completions",
        pieces=1,
        leave=False,
        app="app",
        **more,
    ):
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
            self.sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": list(headers),
            "app": self,
            **more,
        }
        asyncio.run(Refusals(UrgentFirst(getattr(self, app)))(scope, receive, send))


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


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({}, SESSION_HEADER, "chat-7"),
        ({"vllm_xargs": {"session": "own"}}, SESSION_HEADER, "chat-7"),
        ({"vllm_xargs": {"session": "own"}}, (), "own"),
        ({}, (), None),
    ],
)
def test_session_header_overrides_xargs(body, headers, session) -> None:
    server = Server()
    server.post(body, headers)
    assert (server.given[0].extra_args or {}).get("session") == session


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


@pytest.mark.parametrize(
    ("body", "headers", "extra", "priority"),
    [
        ({"vllm_xargs": {"urgency": 1, "mine": 2}}, HEADER, {"urgency": 1, "tenant": "gateway"}, 0),
        ({"priority": 3, "user": "eve"}, (), {"tenant": "eve"}, 3),
        ({"priority": 3}, ((b"x-vllm-priority", b"2"),), None, 2),
        ({}, (), None, 0),
    ],
)
def test_beams_have_the_hints_of_the_request(body, headers, extra, priority) -> None:
    server = Server()
    server.post(body | {"use_beam_search": True}, headers, app="search")
    assert [params.extra_args for params in server.given] == [extra] * 4
    assert server.priorities == [priority] * 4


@pytest.mark.parametrize(
    ("body", "given", "served"),
    [
        ({"service_tier": "priority"}, "priority", "priority"),
        ({"service_tier": "auto"}, "auto", "default"),
        ({"service_tier": "flex"}, "flex", "default"),
        ({"service_tier": "priority", "vllm_xargs": {"urgency": 1}}, "priority", "default"),
        ({"vllm_xargs": {"service_tier": "priority"}}, "priority", "priority"),
        ({"service_tier": ["priority"]}, None, None),
        ({}, None, None),
    ],
)
def test_answer_names_the_service_tier_that_served_it(body, given, served) -> None:
    server = Server(TIERS)
    server.post(body, app="answer")
    assert (server.given[0].extra_args or {}).get("service_tier") == given
    head, part = server.sent
    headers = dict(head["headers"])
    assert headers.get(b"x-semsched-service-tier") == (served and served.encode())
    assert json.loads(part["body"]) == server.reply | {"service_tier": served}
    assert int(headers[b"content-length"]) == len(part["body"])


@pytest.mark.parametrize(
    ("headers", "more", "level"),
    [
        ((), {}, b"1; "),
        (HEADER, {}, b"0; "),
        ((), {"user": "gateway"}, b"0; "),  # nothing better is known
        (((b"x-semsched-tenant", b"web"),), {"user": "gateway"}, b"1; "),
        (((b"x-semsched-tenant", b""),), {"user": "gateway"}, b"1; "),
        (HEADER, {"user": "web"}, b"0; "),
    ],
)
@pytest.mark.parametrize(
    "claim", [{"vllm_xargs": {"urgency": 0}}, {"priority": -1}, {"service_tier": "priority"}]
)
def test_level_that_a_client_can_claim_is_that_of_its_tenant(claim, headers, more, level) -> None:
    hints = {
        "urgency": "cap",
        "priority": "cap",
        "most_urgent_level": 1,
        "most_urgent_level_of": {"gateway": 0},
    }
    server = Server({**TIERS, "hints": hints})
    server.post({**claim, **more}, headers, app="answer")
    headers = dict(server.sent[0]["headers"])
    assert headers[b"x-semsched-level"].startswith(level)
    if "service_tier" in claim:
        served = b"priority" if level == b"0; " else b"default"
        assert headers[b"x-semsched-service-tier"] == served


@pytest.mark.parametrize("answer", [ChatCompletionResponse, CompletionResponse])
def test_vllms_own_answers_name_it(answer) -> None:
    usage = UsageInfo(prompt_tokens=1, total_tokens=1)
    server = Server(TIERS)
    server.reply = answer(model="m", choices=[], usage=usage).model_dump()
    server.post({"service_tier": "priority"}, app="answer")
    assert json.loads(server.sent[1]["body"])["service_tier"] == "priority"


def test_stream_names_the_service_tier_in_its_head() -> None:
    server = Server(TIERS)
    server.post({"service_tier": "priority"}, app="stream")
    assert dict(server.sent[0]["headers"])[b"x-semsched-service-tier"] == b"priority"
    assert [message["body"] for message in server.sent[1:]] == [b"data: {}"] * 2


def test_without_tiers_that_have_one_no_service_tier_is_read_or_named() -> None:
    server = Server()
    server.post({"service_tier": "priority"}, app="answer")
    assert server.given[0].extra_args is None
    assert json.loads(server.sent[1]["body"]) == server.reply
    assert b"x-semsched-service-tier" not in dict(server.sent[0]["headers"])


def test_error_names_no_service_tier() -> None:
    server = Server(TIERS)
    server.status = 400
    server.post({"service_tier": "priority"}, app="answer")
    assert b"x-semsched-service-tier" not in dict(server.sent[0]["headers"])


def test_ids_of_vllms_beams_are_recognized() -> None:
    names = []

    class Serving(BeamSearchOnlineMixin):
        renderer = engine_client = MagicMock()

    def generate(prompt, params, name, **more):
        names.append(name)
        raise InterruptedError

    Serving.engine_client.generate = generate
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    params = MagicMock(beam_width=2, max_tokens=1, temperature=0.0, allowed_token_ids=None)
    search = Serving().beam_search(prompt, "cmpl-7", params)
    with pytest.raises(InterruptedError):
        asyncio.run(anext(search))
    assert names and all(map(is_beam, names))
    assert is_beam(names[0] + "-0a1b2c3d")  # as it reaches the engine
    assert not is_beam("cmpl-beam-1") and not is_beam("")


class PoolingServer(Server):
    """Its model gives embeddings; `encode` takes no engine, as vLLM's."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        parallel = SimpleNamespace(data_parallel_size=2, local_engines_only=False)
        parallel._api_process_count, parallel._api_process_rank = 1, 0
        self.state.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.error = error
        self.ranks: list[int | None] = []

    async def add_request(self, request_id, prompt, params, data_parallel_rank=None):
        self.ranks.append(data_parallel_rank)
        if self.error is not None:
            raise self.error

    async def encode(self, prompt, pooling_params, request_id):
        self.given.append(pooling_params)
        await self.add_request(request_id, prompt, pooling_params)
        yield SimpleNamespace(outputs=SimpleNamespace(data=None))

    async def embed(self, scope, receive, send):
        await receive()
        client = self.state.engine_client
        outputs = [
            client.encode(prompt="", pooling_params=PoolingParams(), request_id=f"id-{number}")
            for number in range(2)
        ]
        for each in outputs:
            await anext(each)


def test_pooling_requests_have_a_tenant_and_an_engine() -> None:
    server = PoolingServer()
    server.post({}, HEADER, "/v1/embeddings", app="embed")
    assert [params.extra_kwargs for params in server.given] == [{"tenant": "gateway"}] * 2
    assert server.ranks == [0, 1]


def test_refusal_of_a_pooling_request_reaches_the_server() -> None:
    """vLLM 0.33 raises it."""
    full = Refusal(Code.OVER_CAPACITY, "the queue is full", 3.0)
    server = PoolingServer(GenerationError(full.to_sentence()))
    with pytest.raises(RequestRefused) as refused:
        server.post({}, HEADER, "/v1/embeddings", app="embed")
    assert refused.value.refusal == full
