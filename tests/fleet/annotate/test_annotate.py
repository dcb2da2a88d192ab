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
