"""Replica and ingress on stand-ins for Ray: refusals, load, reload."""

import asyncio
import json
from types import SimpleNamespace

import fake_ray
import pytest

from vllm_semantic_sched.policy.overload.refusal import FINISH_REASON, Code, Refusal

pytestmark = pytest.mark.engine

FULL = Refusal(Code.OVER_CAPACITY, "the queue is full", 3.0)
POLICY = "levels: 3\ndefault_level: 1\n"
STATUS = {"running": 1, "waiting": 2, "levels": [1, 0, 2], "kv_free": 0.25}
ERROR_EVENT = 'data: {"error": {"message": "the queue is full", "code": 429}}\n\n'
DONE = "data: [DONE]\n\n"


def refused_output():
    answer = SimpleNamespace(finish_reason=FINISH_REASON, stop_reason=FULL.to_text())
    return SimpleNamespace(outputs=[answer])


class Client:
    """An engine client: it answers utility calls and generates what it is told to."""

    def __init__(self, policy, outputs=()):
        config = {"semantic_sched": {"policy": str(policy)}}
        self.vllm_config = SimpleNamespace(additional_config=config)
        self.outputs, self.asked, self.requests = outputs, [], []

    async def generate(self, request):
        self.requests.append(request)
        for output in self.outputs:
            yield output


def request(**fields):
    return SimpleNamespace(**({"vllm_xargs": None, "user": None, "stream": False} | fields))


@pytest.fixture
def module(monkeypatch):
    module = fake_ray.load("server")

    async def ask(client, command):
        client.asked.append(command)
        if command == "status" and client.outputs == "dead":
            raise RuntimeError("the engine is dead")
        return [STATUS if command == "status" else {"result": "adopted"}]

    monkeypatch.setattr(module, "ask_engines", ask)
    monkeypatch.setattr("vllm_semantic_sched.engine.http.admin.ask_engines", ask)
    monkeypatch.setattr(module.SemanticStatLogger, "through_ray", False)
    monkeypatch.setattr(module, "_RELOAD_SECONDS", 0.02)
    return module


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    return path


def run_server(module, client, test):
    async def run():
        server = module.UrgencyServer(SimpleNamespace(engine_client=client))
        await server.start()
        try:
            return await asyncio.wait_for(test(server), 120)
        finally:
            server._reloading.cancel()

    return asyncio.run(run())


async def parts_of(stream):
    return [part async for part in stream]


@pytest.mark.parametrize("method", ["chat", "completions"])
def test_refusal_becomes_an_error_with_its_status(module, policy, method):
    async def test(server):
        return await parts_of(await getattr(server, method)(request()))

    (error,) = run_server(module, Client(policy, [refused_output()]), test)
    assert error.error.code == 429
    assert error.error.message == "the queue is full"
    assert Refusal.from_text(error.error.type) == FULL


def test_answers_pass_unchanged(module, policy):
    outputs = [SimpleNamespace(outputs=[]), SimpleNamespace(outputs=[])]

    async def test(server):
        return await parts_of(await server.completions(request()))

    assert run_server(module, Client(policy, outputs), test) == outputs


def with_refusals(parts, refusals):
    """What becomes of the parts of an answer, and whether it was closed."""
    closed = []

    async def answer():
        try:
            for part in parts:
                yield part
        finally:
            closed.append(True)

    got = asyncio.run(parts_of(fake_ray.load("server").with_refusals(answer(), refusals)))
    assert closed
    return [Refusal.from_text(one.error.type) if hasattr(one, "error") else one for one in got]


@pytest.mark.parametrize("parts", [[[ERROR_EVENT, DONE]], [ERROR_EVENT, DONE]])
def test_stream_refused_before_its_first_token(parts):
    assert with_refusals(parts, [FULL]) == [FULL]


def test_stream_refused_later():
    token = 'data: {"choices": []}\n\n'
    first, last = with_refusals([[token], [token, ERROR_EVENT, DONE]], [FULL])
    assert first == [token]
    assert last[0] == token and last[2] == DONE
    assert json.loads(last[1].removeprefix("data: ")) == FULL.body()
    assert with_refusals([token, ERROR_EVENT], [FULL])[0] == token


def test_error_of_vllm_passes():
    assert with_refusals([[ERROR_EVENT, DONE]], []) == [[ERROR_EVENT, DONE]]


@pytest.mark.parametrize(
    ("fields", "headers", "extra"),
    [
        ({"user": "ann"}, {}, {"tenant": "ann"}),
        ({"user": "ann"}, {"x-semsched-tenant": "bob"}, {"tenant": "bob"}),
        (
            {"vllm_xargs": {"urgency": 1}},
            {"x-semsched-tenant": "bob"},
            {"urgency": 1, "tenant": "bob"},
        ),
        ({"vllm_xargs": {"urgency": 1}}, {}, {"urgency": 1}),
        ({"user": "ann"}, {"x-session-id": "chat-7"}, {"tenant": "ann", "session": "chat-7"}),
        ({"vllm_xargs": {"session": "own"}}, {"x-session-id": "chat-7"}, {"session": "chat-7"}),
    ],
)
def test_tenant_and_session_reach_the_engine(module, policy, fields, headers, extra):
    client = Client(policy)

    async def test(server):
        info = SimpleNamespace(headers=headers)
        return await parts_of(await server.chat(request(**fields), info))

    run_server(module, client, test)
    assert client.requests[0].vllm_xargs == extra


def test_load_is_reported_beside_rays_own_statistics(module, policy):
    async def test(server):
        return [await server.record_routing_stats() for _ in range(2)]

    first, second = run_server(module, Client(policy), test)
    load = {"number": 1, "work": 3, "by_level": [1, 0, 2], "kv_free": 0.25}
    assert first == {"rays": "own", "semsched": load}
    assert second["semsched"]["number"] == 2


def test_load_of_a_dead_engine_is_not_reported(module, policy):
    async def test(server):
        return await server.record_routing_stats()

    assert run_server(module, Client(policy, "dead"), test) == {"rays": "own"}


COMMANDS = ["load_policy", "adopt_policy"]


def test_policy_is_reloaded_when_its_file_changes(module, policy):
    client = Client(policy)

    async def test(server):
        while len(client.asked) < 2:
            await asyncio.sleep(0.02)
        assert client.asked == COMMANDS  # it may have changed since the engine read it
        policy.write_text(POLICY + "protect: {level: 0}\n")
        while len(client.asked) < 4:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)

    run_server(module, client, test)
    assert client.asked == COMMANDS * 2


def ingress(error=None):
    module = fake_ray.load("ingress")
    one = module.UrgencyIngress()
    one.error = error
    return one


@pytest.mark.parametrize("method", ["chat", "completions"])
def test_ingress_answers_with_retry_after(method):
    error = fake_ray.ErrorInfo(FULL.message, FULL.to_text(), 429)
    response = asyncio.run(getattr(ingress(error), method)(None, None))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert json.loads(response.body) == FULL.body()


def test_ingress_passes_other_errors_and_answers():
    other = ingress(fake_ray.ErrorInfo("no such model", "NotFoundError", 404))
    with pytest.raises(fake_ray.OpenAIHTTPException):
        asyncio.run(other.chat(None, None))
    assert asyncio.run(ingress().chat(None, None)) == "answer"
