"""Requests pass the HTTP server in the order of their urgency."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from vllm_semantic_sched.engine.http import preparation
from vllm_semantic_sched.engine.http.middleware import Refusals
from vllm_semantic_sched.engine.http.preparation import (
    LARGEST_BODY,
    PreviewRules,
    UrgentFirst,
    adopt_rules,
    read_user,
)
from vllm_semantic_sched.engine.http.request_context import RequestContext, ServerState, incoming
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.predict.instant import InstantReader

pytestmark = pytest.mark.engine

POLICY = parse_policy({"levels": 5, "default_level": 2})


@pytest.fixture(scope="module")
def rules():
    return PreviewRules(POLICY, InstantReader.load())


def body(level=None, text="hello", **more):
    extra = {} if level is None else {"vllm_xargs": {"urgency": level}}
    return json.dumps({"prompt": text, **extra, **more}).encode()


class Server:
    """A fake application that prepares requests one after the other, on one thread. A slow one
    takes until so many others are prepared, or longer than any test should."""

    def __init__(self, rules=None, slow_until: int = 0) -> None:
        self.slow_until = slow_until
        self.state = SimpleNamespace(semsched=ServerState(rules=rules))
        self.prepared = []
        self.middleware = Refusals(UrgentFirst(self.app))

    async def app(self, scope, receive, send):
        request = json.loads((await receive())["body"])
        await asyncio.sleep(0.001)
        if request["prompt"] == "broken":
            raise ValueError("broken")
        if request["prompt"] == "slow":
            await self.others()
        self.prepared.append(request["prompt"])
        if (is_prepared := incoming.get().prepared) is not None:
            is_prepared()
        await asyncio.sleep(0.5 if request["prompt"] == "long answer" else 0)

    async def others(self) -> None:
        for _ in range(10_000):
            if len(self.prepared) >= self.slow_until:
                return
            await asyncio.sleep(0.001)

    async def post(self, raw):
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive():
            return messages.pop(0)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": self}
        await self.middleware(scope, receive, None)


def serve(server, *bodies):
    async def all_at_once():
        return await asyncio.gather(*map(server.post, bodies), return_exceptions=True)

    return asyncio.run(all_at_once())


def burst(count=20):
    return [body(4, f"small talk {at}") for at in range(count)]


def test_urgent_request_at_the_end_of_a_burst_is_prepared_first(rules) -> None:
    server = Server(rules)
    serve(server, *burst(), body(0, "emergency"))
    # Two had begun when it came.
    assert server.prepared.index("emergency") == 2
    assert len(server.prepared) == 21


def test_without_rules_requests_keep_their_order() -> None:
    server = Server()
    serve(server, *burst(), body(0, "emergency"))
    assert server.prepared[-1] == "emergency"


def test_urgent_text_is_recognized(rules) -> None:
    server = Server(rules)
    text = "my father collapsed, he is not breathing and has no pulse"
    serve(server, *[body(None, f"write a poem about spring, number {at}") for at in range(20)],
          body(None, text))  # fmt: skip
    assert server.prepared.index(text) == 2


def test_failing_slow_or_long_requests_block_nobody(rules) -> None:
    server = Server(rules, slow_until=6)
    errors = serve(
        server,
        *[body(0, text) for text in ("broken", "broken", "slow", "slow", "long answer")],
        *burst(),
    )
    assert sum(isinstance(error, ValueError) for error in errors) == 2
    assert len(server.prepared) == 23
    assert server.prepared.index("slow") > 5  # its slot was given away


def test_pictures_hold_no_slot(rules, monkeypatch) -> None:
    """They are fetched from other servers, for as long as that takes."""
    monkeypatch.setattr(preparation, "_LONGEST", 600.0)  # no slot is given up
    server = Server(rules, slow_until=1)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    slow = [body(0, "slow", messages=picture) for _ in range(40)]
    serve(server, *slow, body(0, "emergency"))
    assert server.prepared[0] == "emergency"


def test_flood_of_one_tenant_holds_nobody_else_up(rules) -> None:
    server = Server(rules)
    flood = [body(0, f"flood {at}", user="loud") for at in range(40)]
    serve(server, *flood, body(0, "emergency", user="quiet"))
    assert server.prepared.index("emergency") <= 3


def test_body_beyond_the_bound_is_not_held_back(rules) -> None:
    server = Server(rules)
    sent = []

    async def app(scope, receive, send):
        while (message := await receive()).get("more_body", False):
            sent.append(len(message["body"]))
        sent.append(len(message["body"]))

    async def post():
        chunk = b"a" * 2**16
        pulled = 0

        async def receive():
            nonlocal pulled
            pulled += 1
            assert pulled - len(sent) <= LARGEST_BODY // len(chunk) + 1  # never more in memory
            return {"type": "http.request", "body": chunk, "more_body": pulled < 64}

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": server}
        await Refusals(UrgentFirst(app))(scope, receive, None)

    asyncio.run(post())
    assert sum(sent) == 64 * 2**16


def test_client_that_leaves_while_waiting_gives_up_its_turn(rules) -> None:
    server = Server(rules)

    async def leave():
        tasks = [asyncio.create_task(server.post(raw)) for raw in burst(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        tasks[4].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    ends = asyncio.run(leave())
    assert sum(isinstance(end, asyncio.CancelledError) for end in ends) == 2
    assert len(server.prepared) == 4


@pytest.mark.parametrize(
    ("raw", "level"),
    [
        (body(1), 1),
        (body(None, "he is not breathing and has no pulse, help"), 0),
        (body(3, "he is not breathing and has no pulse, help"), 3),
        (body(None, "", priority=4), 4),
        (body(None, ""), 2),
        (b'"text"', 2),
        (b"{", 2),
        (b"\xff", 2),
        (body(99, ""), 2),
        (b"[" * 20_000, 2),
        (None, 2),  # too large to be parsed twice
        (json.dumps({"prompt": [1, 2, 3]}).encode(), 2),
    ],
)
def test_level_of_a_body(rules, raw, level) -> None:
    assert rules.preview(raw).level == level


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (body(3, "he is not breathing"), b"3; hint"),
        (body(None, "hello", priority=4), b"4; priority"),
        (body(None, "he is not breathing and has no pulse, help"), b"0; instant"),
        (body(None, ""), b"2; default"),
    ],
)
def test_answer_says_which_level_the_request_came_with(rules, raw, value) -> None:
    server = Server(rules)
    sent = []

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": server}
    asyncio.run(Refusals(UrgentFirst(app))(scope, receive, send))
    assert (b"x-semsched-level", value) in sent[0]["headers"]
    server.state.semsched.rules = None  # a policy that does not order by urgency
    sent.clear()
    asyncio.run(Refusals(UrgentFirst(app))(scope, receive, send))
    assert sent[0]["headers"] == []


@pytest.mark.parametrize(
    ("header", "raw", "level"),
    [
        (b"1", body(None, "", priority=4), 1),  # as in vLLM, the header overrides the body
        (b"-7", None, 0),  # although the body is not read
        (b" 3 ", b"{", 3),
        (b"0", body(None, "", priority=4), 2),
        (b"urgent", body(None, "", priority=4), 4),
        (b"9" * 5000, body(None, ""), 2),
        (b"4", body(1), 1),  # an urgency is more than a priority
    ],
)
def test_level_of_a_priority_header(rules, header, raw, level) -> None:
    request = RequestContext.of({"headers": [(b"x-vllm-priority", header)]})
    assert rules.preview(raw, request.priority).level == level


def test_hints_are_honored_as_far_as_the_policy_allows(rules) -> None:
    ignoring = parse_policy({"hints": {"urgency": "ignore", "priority": "ignore"}})
    assert PreviewRules(ignoring, None).preview(body(0)).level == ignoring.default_level


def test_text_of_a_chat_is_what_the_user_says() -> None:
    request = {
        "messages": [
            {"role": "system", "content": "you triage heart attacks"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "what?"},
            {"role": "user", "content": [{"type": "text", "text": "second"}, {"type": "image"}]},
        ]
    }
    assert read_user(request) == (["first", "second"], True)
    assert read_user({"prompt": ["a", "b"]}) == (["a", "b"], False)
    assert read_user({"input": [{"role": "user", "content": "c"}]}) == (["c"], False)
    assert read_user({"messages": 7, "prompt": None}) == ([], False)


class Counted(list):
    """A list that counts how often its entries are visited."""

    visits = 0

    def __iter__(self):
        for entry in super().__iter__():
            Counted.visits += 1
            yield entry


def test_walk_through_a_request_is_bounded() -> None:
    deep = "end"
    for _ in range(400):
        deep = [deep]
    assert read_user({"messages": deep})[0] == []
    Counted.visits = 0
    wide = Counted([Counted(["a"] * 400) for _ in range(400)])
    assert 0 < len(read_user({"prompt": wide})[0]) <= 4096
    assert Counted.visits <= 2 * 4096
    chat = [{"role": "user", "content": str(turn)} for turn in range(5000)]
    assert read_user({"messages": chat})[0][-1] == "4999"  # the newest turn counts


def test_broken_rules_leave_the_order_of_arrival() -> None:
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=SimpleNamespace()))
    adopt_rules(app)
    assert app.state.semsched.rules is None
    adopt_rules(SimpleNamespace(state=SimpleNamespace()))


def test_rules_stay_when_new_ones_cannot_be_read(rules) -> None:
    state = SimpleNamespace(vllm_config=SimpleNamespace(), semsched=ServerState(rules=rules))
    adopt_rules(SimpleNamespace(state=state))
    assert state.semsched.rules is rules


def test_error_in_reading_a_body_is_the_default_level(rules, monkeypatch) -> None:
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(InstantReader, "read", fail)
    server = Server(rules)
    serve(server, body(None, "hello"), body(None, "again"))
    assert server.prepared == ["hello", "again"]
