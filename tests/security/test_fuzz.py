"""Whatever a client sends through the ASGI stack: no exception of ours, bounded work, and the
application receives every byte."""

import asyncio
import json
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.http.middleware import Refusals
from vllm_semantic_sched.engine.http.preparation import LARGEST_BODY, PreviewRules, UrgentFirst
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.fleet.annotate.annotator import Annotator
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.predict.instant import InstantReader

pytestmark = pytest.mark.engine

CASES = 20_000
LOOP = asyncio.new_event_loop()
INSTANT = InstantReader.load()
RULES = PreviewRules(parse_policy({"tenants": {"fair": True}}), INSTANT)

texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["he is not breathing", "\x00", "\ud83d", "[" * 500, "\u202e", "a" * 3000]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "text", "type", "x"]), inner),
    ),
    max_leaves=12,
)
hints = st.fixed_dictionaries(
    {}, optional={"urgency": values, "tenant": values, "dedup_key": values, "x": values}
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "prompt": values,
        "messages": values,
        "input": values,
        "user": values,
        "priority": values,
        "vllm_xargs": st.one_of(values, hints),
    },
)
bodies = st.one_of(
    requests.map(lambda request: json.dumps(request).encode("utf-8", "surrogatepass")),
    st.binary(max_size=200),
    st.integers(0, 3000).map(lambda depth: b"[" * depth),
    st.integers(0, 3000).map(lambda depth: b'{"messages":' * depth),
    st.sampled_from([b'{"prompt": "' + b"a" * LARGEST_BODY + b'"}', b"\xff\xfe", b""]),
)
headers = st.lists(
    st.tuples(
        st.sampled_from([b"x-semsched-tenant", b"x-semsched-placement", b"content-length"]),
        st.binary(max_size=30),
    ),
    max_size=3,
)
paths = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/x"])


class Server:
    """Receives a body and hands it to a fake engine."""

    def __init__(self) -> None:
        self.body = b""
        self.params: list[SamplingParams] = []
        parallel = SimpleNamespace(
            data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
        )
        self.state = SimpleNamespace(
            semsched=ServerState(rules=RULES),
            engine_client=self,
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )
        self.stack = Refusals(UrgentFirst(self.app))

    async def generate(self, prompt, sampling_params, request_id):
        self.params.append(sampling_params)
        return
        yield

    async def app(self, scope, receive, send):
        self.body, more = b"", True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            self.body += message.get("body", b"")
        async for _ in self.state.engine_client.generate("", SamplingParams(), "id"):
            pass


def variants(body: bytes, chance: Random) -> list[bytes]:
    """A body, and what becomes of it on a bad line or in bad hands."""
    at, to = sorted((chance.randrange(len(body) + 1), chance.randrange(len(body) + 1)))
    flipped = bytearray(body)
    for _ in range(3 if body else 0):
        flipped[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    depth = chance.randrange(3000)
    return [
        body,
        body[:at],
        body[at:],
        body[:at] + body[to:],
        body[:to] + body[at:],
        bytes(flipped),
        b"[" * depth + body + b"]" * depth,
        b'{"messages":' * depth + body,
        body.replace(b'"', b"\x00"),
        body.replace(b"1", b"1" * 5000),
    ]


@given(bodies, headers, paths, st.integers(0, 2**32))
@settings(max_examples=CASES // 10)
def test_whatever_is_sent_reaches_the_application_unharmed(body, given, path, seed) -> None:
    chance = Random(seed)
    for variant in variants(body, chance):
        send(variant, given, path, pieces=chance.randint(1, 3))


def send(body: bytes, given: list[tuple[bytes, bytes]], path: str, pieces: int) -> None:
    server = Server()
    size = max(1, -(-len(body) // pieces))
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, start=1)
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def answer(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": given, "app": server}
    LOOP.run_until_complete(server.stack(scope, receive, answer))
    assert server.body == body and len(server.params) == 1 and not sent
    tenants = [value for name, value in given if name == b"x-semsched-tenant"]
    if tenants:
        assert server.params[0].extra_args["tenant"] == tenants[-1].decode("latin-1")


@given(requests)
@settings(max_examples=CASES // 20)
def test_whatever_is_annotated_gets_a_level(request_body) -> None:
    annotator = Annotator(Policy(), INSTANT)
    assert 0 <= annotator.answer(request_body)["level"] < 5
    assert not annotator.failures, "the reading itself failed"


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch) -> None:
    """A traceback in the log would be an error that something had to catch."""

    def fail(*args, **kwargs):
        raise AssertionError(args)

    monkeypatch.setattr(logger, "exception", fail)
