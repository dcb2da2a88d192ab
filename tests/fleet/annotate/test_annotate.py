"""The annotator: readings, the HTTP endpoint, the LiteLLM hook."""

import asyncio
import importlib
import json
import sys
from types import ModuleType

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from vllm_semantic_sched.fleet.annotate.annotator import Annotator, Reader, make_app
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.instant import InstantReader

URGENT = "my father collapsed, he is not breathing and has no pulse"
CALM = "write a poem about spring"


@pytest.fixture(scope="module")
def annotator() -> Annotator:
    return Annotator.load("ems")


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_text_and_chat_get_the_same_level(annotator) -> None:
    assert annotator.annotate({"text": URGENT}).level == 0
    assert annotator.annotate(chat(URGENT)) == annotator.annotate({"text": URGENT})
    assert annotator.annotate({"text": CALM}).level > 2


def test_service_tier_counts_where_the_policy_has_it(annotator) -> None:
    tiers = [tier.model_dump() for tier in annotator.policy.tiers]
    tiers[4]["service_tier"] = "flex"
    policy = parse_policy({"tiers": tiers})
    request = chat(URGENT, service_tier="flex")
    assert Annotator(policy, None).annotate(request).level == 4
    assert annotator.annotate(request).level == 0


def test_hint_overrides_reading_and_limit_bounds_length(annotator) -> None:
    found = annotator.annotate(chat(URGENT, vllm_xargs={"urgency": 3}, max_tokens=7))
    assert found.level == 3 and 0 < found.tokens <= 7 and found.reading is not None
    assert annotator.annotate({"text": CALM}).tokens > 7


@pytest.mark.parametrize(
    "request_", [{}, {"text": ""}, {"text": 7}, {"messages": 7}, chat("", max_tokens="x")]
)
def test_request_without_a_text_gets_the_defaults(annotator, request_) -> None:
    found = annotator.annotate(request_)
    assert (found.level, found.tokens, found.reading) == (2, 256.0, None)


def test_error_gives_the_defaults_and_is_logged_once(monkeypatch, caplog) -> None:
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(InstantReader, "read", fail)
    monkeypatch.setattr("vllm_semantic_sched.engine.guard.logger.propagate", True)
    broken = Annotator.load("ems")
    assert [broken.annotate({"text": URGENT}).level for _ in range(3)] == [2, 2, 2]
    assert sum("annotate failed" in one.message for one in caplog.records) == 1


def post(annotator, *bodies: bytes, reader=None, headers=None):
    async def all_of_them():
        async with TestServer(make_app(annotator, reader)) as server, ClientSession() as session:
            answers = []
            for body in bodies:
                url = server.make_url("/annotate")
                async with session.post(url, data=body, headers=headers) as answer:
                    answers.append((answer.status, await answer.text()))
            async with session.get(server.make_url("/health")) as answer:
                assert answer.status == 200
            return answers

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(("header", "level"), [(None, 0), ("web", 1), ("cad", 0)])
def test_gateway_names_the_tenant_whose_limit_holds(header, level) -> None:
    hints = {"urgency": "cap", "most_urgent_level": 1, "most_urgent_level_of": {"cad": 0}}
    body = json.dumps({"text": CALM, "vllm_xargs": {"urgency": 0, "tenant": "cad"}}).encode()
    headers = {} if header is None else {"X-Semsched-Tenant": header}
    [(status, answer)] = post(
        Annotator(parse_policy({"hints": hints}), None), body, headers=headers
    )
    assert (status, json.loads(answer)["level"]) == (200, level)


class Predictor:
    """Level 1 for everything; fails for one text. Keeps the texts of each call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def predict(self, texts) -> list[Prediction]:
        self.calls.append([*texts])
        if "broken" in texts:
            raise RuntimeError("no reading")
        return [Prediction((0.0, 1.0, 0.0, 0.0, 0.0)) for _ in texts]


def test_predictor_decides_and_instant_reader_stands_in_for_it(annotator) -> None:
    bodies = [{"text": CALM}, {"text": CALM, "vllm_xargs": {"urgency": 3}}, {"text": "broken"}, {}]
    answers = post(
        annotator, *(json.dumps(body).encode() for body in bodies), reader=Reader(Predictor())
    )
    read = [json.loads(text) for _, text in answers]
    assert [(one["level"], one["source"]) for one in read[:2]] == [(1, "prediction"), (3, "hint")]
    assert [one["source"] for one in read[2:]] == ["instant", "default"]
    assert read[0]["provisional"]["urgency"][1] < 0.9  # still the instant reader's


def test_texts_that_wait_are_read_together() -> None:
    async def read(reader: Reader) -> None:
        await asyncio.gather(*(reader.read(str(number)) for number in range(20)))

    predictor = Predictor()
    asyncio.run(read(Reader(predictor)))
    assert [len(call) for call in predictor.calls] == [16, 4]


def test_endpoint_answers_with_level_length_and_reading(annotator) -> None:
    body = json.dumps({"text": URGENT}).encode()
    (status, text), again = post(annotator, body, body)
    answer = json.loads(text)
    assert status == 200 and again == (status, text)
    assert answer["level"] == 0 and answer["tokens"] > 0
    assert sum(answer["provisional"]["urgency"]) == pytest.approx(1)
    assert sum(answer["provisional"]["length"]) == pytest.approx(1)
    assert set(answer["gateways"]) == {"litellm", "llm-d", "dynamo", "smg"}
    assert answer["gateways"]["smg"]["headers"] == {"X-SMG-Priority": "interactive"}


def test_unusable_bodies_get_a_client_error(annotator) -> None:
    bodies = [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"text": "' + b"a" * 300_000 + b'"}']
    assert [status for status, _ in post(annotator, *bodies)] == [400] * 5 + [413]


@pytest.fixture
def hook(monkeypatch):
    """The hook with a stand-in for LiteLLM's base class."""
    base = ModuleType("litellm.integrations.custom_logger")
    base.CustomLogger = type("CustomLogger", (), {})
    for name in ("litellm", "litellm.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    name = "vllm_semantic_sched.fleet.annotate.litellm_hook"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).UrgencyHook(models={"llama"})
    sys.modules.pop(name, None)


def call(hook, data):
    return asyncio.run(hook.async_pre_call_hook(None, None, data, "completion"))


def test_hook_adds_the_level_for_its_models(hook) -> None:
    sent = call(hook, chat(URGENT, model="llama", vllm_xargs={"tenant": "a"}))
    assert sent["vllm_xargs"] == {"tenant": "a", "urgency": 0}
    assert sent["messages"] == chat(URGENT)["messages"]
    assert "vllm_xargs" not in call(hook, chat(URGENT, model="gpt"))


def test_hook_keeps_hints_and_requests_without_a_text(hook) -> None:
    given = chat(URGENT, model="llama", vllm_xargs={"urgency": 99})  # the server counts it
    assert call(hook, dict(given)) == given
    assert "vllm_xargs" not in call(hook, {"model": "llama", "input": [1, 2]})
    assert call(hook, {"model": "llama", "vllm_xargs": 7}) == {"model": "llama", "vllm_xargs": 7}


def test_litellm_finds_the_hook_on_its_class(hook) -> None:
    assert "async_pre_call_hook" in vars(type(hook))


SESSIONS = {"sessions": {"memory": 600.0}}
LEVELS = {"there is a fire": 0, "never mind": 4}


class Words(Predictor):
    """The level of the newest known words in a text, else 3."""

    def predict(self, texts) -> list[Prediction]:
        self.calls.append([*texts])
        places = [{text.rfind(said): level for said, level in LEVELS.items()} for text in texts]
        levels = [found[max(found)] if max(found) >= 0 else 3 for found in places]
        return [Prediction(tuple(float(level == one) for one in range(5))) for level in levels]


class Gateway:
    """Asks one annotator with a predictor, in a session."""

    def __init__(self) -> None:
        self.now = 0.0
        self.annotator = Annotator(parse_policy(SESSIONS), None, lambda: self.now)
        self.predictor = Words()

    def ask(self, request, session="s", tenant=None, read=True) -> tuple[int, str]:
        turn = self.annotator.begin(request, tenant, session)
        text = self.annotator.text_of(request, turn)
        prediction = self.predictor.predict([text])[0] if read and text else None
        answer = self.annotator.answer(request, prediction, tenant, turn)
        return answer["level"], answer["source"]


def test_text_is_read_after_what_its_session_said() -> None:
    gateway = Gateway()
    assert gateway.ask({"text": "there is a fire"}) == (0, "prediction")
    assert gateway.ask(chat("in the kitchen")) == (0, "prediction")
    assert gateway.ask(chat("in the kitchen"), session="other") == (3, "prediction")
    assert gateway.ask(chat("in the kitchen"), tenant="other") == (3, "prediction")
    extra = {"session": "s"}
    assert gateway.ask(chat("help", vllm_xargs=extra), session=None) == (0, "prediction")
    assert gateway.ask({"text": "never mind"}) == (4, "prediction")
    gateway.now = 601.0
    assert gateway.ask({"text": "hello"}) == (3, "prediction")


def test_chat_that_brings_its_turns_is_read_as_it_is_and_leaves_its_last_one() -> None:
    gateway = Gateway()
    gateway.ask({"text": "there is a fire"})
    said = ["hello", "hi", "never mind"]
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    assert gateway.ask({"messages": messages}) == (4, "prediction")
    assert gateway.predictor.calls[-1] == ["hello\nnever mind"]
    gateway.ask({"text": "and now?"})
    turns = ["there is a fire", "never mind", "and now?"]
    assert gateway.predictor.calls[-1] == ["".join(f"\n<|im_start|>user\n{x}" for x in turns)]


def test_level_of_a_session_is_inherited_as_in_an_engine() -> None:
    gateway = Gateway()
    assert gateway.ask({"text": "a", "vllm_xargs": {"urgency": 1}}) == (1, "hint")
    assert gateway.ask({"text": "b"}) == (1, "session"), "the client stated it"
    assert gateway.ask({"messages": []}, read=False) == (1, "session")
    assert gateway.ask({"text": "there is a fire"}) == (0, "prediction")
    assert gateway.ask({"text": "c"}, read=False) == (0, "session"), "until the text is read"
    assert gateway.ask({"text": "never mind"}) == (4, "prediction")
    assert gateway.ask({"text": "d"}, read=False) == (2, "default")
    gateway.ask({"text": "e", "vllm_xargs": {"urgency": 0}})
    gateway.now = 601.0
    assert gateway.ask({"text": "f"}) == (3, "prediction")


def test_policy_without_sessions_reads_each_request_alone(annotator) -> None:
    assert annotator.begin({"text": URGENT}, None, "s") is None


def test_endpoint_takes_the_session_of_the_header() -> None:
    predictor = Words()
    bodies = [json.dumps(chat(text)).encode() for text in ("there is a fire", "in the kitchen")]
    annotator = Annotator(parse_policy(SESSIONS), None)
    headers = {"X-Session-ID": "s"}
    answers = post(annotator, *bodies, reader=Reader(predictor), headers=headers)
    assert [json.loads(text)["level"] for _, text in answers] == [0, 0]


def test_hook_takes_the_session_of_the_header(hook) -> None:
    hook._annotator = Annotator(parse_policy(SESSIONS), None)

    def urgency(**more):
        request = {"headers": {"x-session-id": "s"}}
        data = chat("in the kitchen", model="llama", proxy_server_request=request, **more)
        return call(hook, data)["vllm_xargs"]["urgency"]

    assert urgency(vllm_xargs={"urgency": 0}) == 0
    assert urgency() == 0
