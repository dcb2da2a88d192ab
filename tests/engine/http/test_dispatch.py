"""The middleware chooses the engine of each request, around a fake application and engine."""

import asyncio
import inspect
import json
from types import SimpleNamespace

import pytest

from vllm_semantic_sched.engine.http import dispatch
from vllm_semantic_sched.engine.http.middleware import Refusals
from vllm_semantic_sched.engine.http.preparation import GlanceRules, UrgentFirst
from vllm_semantic_sched.engine.stat_logger import ApiServerCounters
from vllm_semantic_sched.engine.vllm_api import RANK, engine_count
from vllm_semantic_sched.policy.config import parse_policy

pytestmark = pytest.mark.engine

OUTPUT = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=None, stop_reason=None)])


class Server:
    """A server whose engines answer when they are told to."""

    def __init__(self, engines=2, rules=True, **policy) -> None:
        self.parallel = SimpleNamespace(
            data_parallel_size=engines,
            data_parallel_size_local=1,
            local_engines_only=False,
            _api_process_count=1,
        )
        self.state = SimpleNamespace(
            engine_client=self, vllm_config=SimpleNamespace(parallel_config=self.parallel)
        )
        if rules:
            self.state.semsched_glance_rules = GlanceRules(parse_policy(policy), None)
        self.ranks = []
        self.finish = asyncio.Event()
        self.middleware = Refusals(UrgentFirst(self.app))

    async def generate(self, prompt, sampling_params, request_id, data_parallel_rank=None):
        self.ranks.append(data_parallel_rank)
        yield OUTPUT
        await self.finish.wait()
        if prompt == "broken":
            raise ValueError("broken")

    async def app(self, scope, receive, send):
        request = json.loads((await receive())["body"])
        rank = dict(scope["headers"]).get(b"x-data-parallel-rank")
        outputs = self.state.engine_client.generate(
            request["prompt"],
            SimpleNamespace(n=request.get("n", 1)),
            "id",
            data_parallel_rank=None if rank is None else int(rank),
        )
        if request["prompt"] == "abandoned":
            return
        async for _ in outputs:
            pass

    async def post(self, level=None, rank=None, **request):
        body = {"prompt": "hello", **request}
        if level is not None:
            body["vllm_xargs"] = {"urgency": level}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            return messages.pop(0)

        headers = [] if rank is None else [(b"x-data-parallel-rank", str(rank).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "app": self}
        await self.middleware(scope | {"headers": headers}, receive, None)

    async def start(self, **request):
        """The task of a new request, and the engine that it has got."""
        before = len(self.ranks)
        task = asyncio.create_task(self.post(**request))
        while len(self.ranks) == before and not task.done():
            await asyncio.sleep(0)
        return task, self.ranks[-1]

    async def engines_of(self, *levels):
        return [(await self.start(level=level))[1] for level in levels]


def run(case) -> None:
    asyncio.run(asyncio.wait_for(case(), 20))


def test_urgent_request_goes_where_fewer_are_as_urgent() -> None:
    async def case():
        server = Server()
        assert await server.engines_of(0, 4, 4, 4) == [0, 1, 0, 1]
        # Both have two requests. One of engine 0 is urgent.
        assert await server.engines_of(0, 0) == [1, 0]

    run(case)


def test_request_without_a_hint_counts_at_the_default_level() -> None:
    async def case():
        server = Server()
        assert await server.engines_of(None, 1, 3, 1) == [0, 1, 0, 0]

    run(case)


def test_finished_failed_and_cancelled_requests_no_longer_count() -> None:
    async def case():
        server = Server()
        done, _ = await server.start(level=0, rank=1)
        failed, _ = await server.start(level=0, rank=1, prompt="broken")
        server.finish.set()
        await done
        with pytest.raises(ValueError, match="broken"):
            await failed
        server.finish.clear()
        cancelled, _ = await server.start(level=0, rank=1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await server.post(level=0, rank=1, prompt="abandoned")
        # Otherwise all three would go to engine 0.
        assert sorted((await server.engines_of(0, 0, 0))[:2]) == [0, 1]

    run(case)


def test_rank_that_the_client_names_is_kept_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(ApiServerCounters, "add", lambda *_: pytest.fail("an error"))

    async def case():
        server = Server()
        assert [(await server.start(level=0, rank=1))[1] for _ in range(3)] == [1, 1, 1]
        assert await server.engines_of(0, 0, 0) == [0, 0, 0]
        # vLLM refuses these.
        assert [(await server.start(level=0, rank=rank))[1] for rank in (7, -1)] == [7, -1]

    run(case)


@pytest.mark.parametrize(
    "server",
    [
        {"engines": 1},
        {"placement": {"enabled": False}},
        {"rules": False},  # the scheduler does not order by urgency
    ],
)
def test_vllm_chooses(server) -> None:
    async def case():
        assert await Server(**server).engines_of(0, 0, 4) == [None] * 3

    run(case)


def test_vllm_spreads_several_answers_to_one_request() -> None:
    async def case():
        assert (await Server().start(level=0, n=3))[1] is None

    run(case)


def test_engines_can_be_added_and_removed() -> None:
    async def case():
        server = Server(engines=2)
        task, _ = await server.start(level=0)
        server.parallel.data_parallel_size = 3
        assert sorted(await server.engines_of(0, 0, 0)) == [0, 1, 2]
        server.finish.set()
        await task
        server.parallel.data_parallel_size = 2
        assert sorted(await server.engines_of(0, 0)) == [0, 1]

    run(case)


def test_error_leaves_the_choice_to_vllm_and_is_logged_once(monkeypatch, caplog) -> None:
    counted = []

    def fail(config):
        raise RuntimeError

    monkeypatch.setattr(dispatch, "engine_count", fail)
    monkeypatch.setattr(dispatch.logger, "propagate", True)
    monkeypatch.setattr(ApiServerCounters, "add", lambda self, *labels: counted.append(labels))

    async def case():
        assert await Server().engines_of(0, 0, 0) == [None] * 3

    run(case)
    assert counted == [("policy_errors", "choosing an engine")] * 3
    assert sum("choosing an engine" in one.message for one in caplog.records) == 1


def test_errors_are_counted_on_the_metrics_page() -> None:
    from prometheus_client import REGISTRY

    def total():
        labels = {"engine": "http", "doing": "testing"}
        return REGISTRY.get_sample_value("semsched:policy_errors_total", labels) or 0

    before = total()
    ApiServerCounters().add("policy_errors", "testing")
    assert total() == before + 1


def test_engines_of_other_hosts_do_not_count_behind_a_load_balancer() -> None:
    def count(local_engines_only):
        parallel = SimpleNamespace(
            data_parallel_size=8,
            data_parallel_size_local=2,
            local_engines_only=local_engines_only,
        )
        return engine_count(SimpleNamespace(parallel_config=parallel))

    assert (count(False), count(True)) == (8, 2)


def test_generate_of_vllm_has_the_arguments_that_are_used() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    names = list(inspect.signature(AsyncLLM.generate).parameters)
    assert names[2] == "sampling_params" and RANK in names
