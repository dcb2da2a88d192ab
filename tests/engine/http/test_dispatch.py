"""The middleware chooses the engine of each request, around a fake application and engine."""

import asyncio
import contextlib
import inspect
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.http import dispatch, peer_servers
from vllm_semantic_sched.engine.http.middleware import Refusals
from vllm_semantic_sched.engine.http.peer_servers import PeerServers, join_peers
from vllm_semantic_sched.engine.http.preparation import PreviewRules, UrgentFirst
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.vllm_api import RANK, engine_count
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.placement import CACHE_WORTH, Placement

pytestmark = pytest.mark.engine

LEVELS = Policy().levels
OUTPUT = SimpleNamespace(outputs=[SimpleNamespace(finish_reason=None, stop_reason=None)])


class Server:
    """A server whose engines answer when they are told to."""

    def __init__(self, engines=2, rules=True, servers=1, rank=0, **policy) -> None:
        self.parallel = SimpleNamespace(
            data_parallel_size=engines,
            data_parallel_size_local=1,
            local_engines_only=False,
            _api_process_count=servers,
            _api_process_rank=rank,
        )
        self.state = SimpleNamespace(
            engine_client=self, vllm_config=SimpleNamespace(parallel_config=self.parallel)
        )
        if rules:
            self.state.semsched = ServerState(
                rules=PreviewRules(parse_policy(policy), None),
                peers=join_peers(self.state.vllm_config, LEVELS),
            )
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
            SimpleNamespace(n=request.get("n", 1), extra_args=request.get("vllm_xargs")),
            "id",
            data_parallel_rank=None if rank is None else int(rank),
        )
        if request["prompt"] == "abandoned":
            return
        async for _ in outputs:
            pass

    async def post(self, level=None, rank=None, session=None, tenant=None, **request):
        body = {"prompt": "hello", **request}
        if level is not None:
            body["vllm_xargs"] = {"urgency": level}
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            return messages.pop(0)

        given = {
            b"x-data-parallel-rank": rank,
            b"x-session-id": session,
            b"x-semsched-tenant": tenant,
        }
        headers = [(name, str(one).encode()) for name, one in given.items() if one is not None]
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
    asyncio.run(asyncio.wait_for(case(), 120))


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
    monkeypatch.setattr(
        SemanticStatLogger, "count_in_api_server", lambda *_: pytest.fail("an error")
    )

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the API servers share their memory."""
    monkeypatch.setattr(peer_servers, "own_folder", lambda: tmp_path)
    return tmp_path


def test_api_servers_count_each_others_requests(folder) -> None:
    async def case():
        first, second = (Server(servers=2, rank=rank) for rank in (0, 1))
        tasks = [(await first.start(level=0, rank=0))[0] for _ in range(2)]
        assert await second.engines_of(0, 0) == [1, 1]
        assert await first.engines_of(4) == [0]  # a tie, in turn
        first.finish.set()
        await asyncio.gather(*tasks)
        assert await second.engines_of(0, 0) == [0, 0]

    run(case)


def test_without_shared_memory_server_counts_own_requests(monkeypatch, caplog) -> None:
    monkeypatch.setattr(peer_servers, "own_folder", lambda: None)
    monkeypatch.setattr(logger, "propagate", True)

    async def case():
        servers = [Server(servers=2, rank=rank) for rank in (0, 1)]
        assert [await server.engines_of(0, 0) for server in servers] == [[0, 1], [0, 1]]

    run(case)
    assert "the 2 API servers share no memory" in caplog.text


# A request of that level reaches that server, or the n-th of those in flight ends.
EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)) | st.integers(0, 50), max_size=60)


@given(st.integers(1, 5), EVENTS)
def test_no_engine_has_fewer_requests_as_urgent_of_all_servers(engines, events) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts"
        servers = [PeerServers(path, 3, rank, engines, 4) for rank in range(3)]
        placements = [Placement(engines, 4) for _ in servers]
        in_flight = []
        for event in events:
            if isinstance(event, int):
                if in_flight:
                    server, placed = in_flight.pop(event % len(in_flight))
                    placements[server].leave(placed)
                    servers[server].add(placed.engine, placed.level, -1)
                continue
            server, level = event
            for engine, ahead in enumerate(servers[server].others()):
                placements[server].count_others(engine, ahead)
            placed = placements[server].place(level)
            at = [one.engine for _, one in in_flight if one.level <= level]
            assert at.count(placed.engine) == min(map(at.count, range(engines)))
            servers[server].add(placed.engine, level, 1)
            in_flight.append((server, placed))


def test_shared_file_is_gone_when_all_servers_have_it(folder) -> None:
    first = PeerServers(folder / "counts", 2, 0, 2, 3)
    assert list(folder.iterdir())
    second = PeerServers(folder / "counts", 2, 1, 2, 3)
    assert not list(folder.iterdir())
    first.add(1, 1, 5)
    assert second.others() == [[0, 0, 0], [0, 5, 5]]
    assert first.others() == [[0, 0, 0], [0, 0, 0]]


def test_reload_is_told_to_the_other_servers_once(folder) -> None:
    first, second, third = (PeerServers(folder / "counts", 3, rank, 1, 1) for rank in range(3))
    first.tell_reload()
    assert not first.has_reload()
    assert second.has_reload() and third.has_reload()
    assert not second.has_reload()
    third.tell_reload()
    assert first.has_reload() and second.has_reload() and not third.has_reload()


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
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(
        SemanticStatLogger, "count_in_api_server", lambda *labels: counted.append(labels)
    )

    async def case():
        assert await Server().engines_of(0, 0, 0) == [None] * 3

    run(case)
    assert counted == [("policy_errors", "engine_choice")] * 3
    assert sum("choosing an engine" in one.message for one in caplog.records) == 1


def test_errors_are_counted_on_the_metrics_page() -> None:
    from prometheus_client import REGISTRY

    def total():
        labels = {"engine": "http", "doing": "testing"}
        return REGISTRY.get_sample_value("semsched:policy_errors_total", labels) or 0

    before = total()
    SemanticStatLogger.count_in_api_server("policy_errors", "testing")
    assert total() == before + 1


def test_remote_engines_do_not_count_behind_load_balancer() -> None:
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
    names = list(inspect.signature(AsyncLLM.encode).parameters)
    assert names[2:4] == ["pooling_params", "request_id"]
    names = list(inspect.signature(AsyncLLM.add_request).parameters)
    assert names[1] == "request_id" and RANK in names


def test_sessions_of_a_canary_go_to_its_engines() -> None:
    async def case():
        server = Server()
        server.state.semsched.canaries = 1
        server.finish.set()
        for number in range(60):
            await server.post(user=f"caller {number % 20}")
        assert server.ranks[:20] == server.ranks[20:40] == server.ranks[40:]
        assert 4 <= server.ranks[:20].count(0) <= 16
        observing = Server(rules=False)
        observing.state.semsched = ServerState(canaries=1)
        assert (await observing.start())[1] in (0, 1)

    run(case)


SESSIONS = {"sessions": {"memory": 600.0}}


async def serve(server, **request) -> int:
    """A request from start to end; the engine that it has got."""
    task, engine = await server.start(**request)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return engine


def test_session_stays_with_its_engine_while_that_is_worth_it() -> None:
    async def case():
        server = Server(**SESSIONS)
        home = await serve(server, session="a", level=0)
        assert [await serve(server, session="a", level=0) for _ in range(3)] == [home] * 3
        for _ in range(CACHE_WORTH):
            await server.start(level=0, rank=home)
            await server.start(level=3, rank=home)  # these do not delay it
        assert await serve(server, session="a", level=0) == home
        await server.start(level=0, rank=home)
        assert await serve(server, session="a", level=0) == 1 - home
        assert await serve(server, session="a", level=2) == 1 - home, "that has its cache now"

    run(case)


def test_session_of_vllm_xargs_goes_where_the_client_sent_it_before() -> None:
    async def case():
        server = Server(**SESSIONS)
        extra = {"session": "a", "urgency": 0}
        engines = [await serve(server, vllm_xargs=extra, rank=rank) for rank in (1, None, None)]
        assert engines == [1, 1, 1]

    run(case)


def test_sessions_of_different_tenants_do_not_meet() -> None:
    async def case():
        server = Server(**SESSIONS)
        await serve(server, session="a", tenant="x", level=0, rank=1)
        assert await serve(server, session="a", tenant="y", level=0) == 0
        assert await serve(server, session="a", tenant="x", level=0) == 1

    run(case)


@pytest.mark.parametrize(
    ("policy", "session"),
    [
        ({}, "a"),  # the policy has no sessions
        (SESSIONS, None),
        (SESSIONS, " "),
    ],
)
def test_without_sessions_engines_are_chosen_as_before(policy, session) -> None:
    async def case():
        server, plain = Server(engines=3, **policy), Server(engines=3)
        for level in (0, 4, 2, 2, 0, 1, 4, 0, 3):
            asked = await server.start(level=level, session=session)
            assert asked[1] == (await plain.start(level=level))[1]

    run(case)


def test_api_servers_tell_each_other_where_a_session_is(folder) -> None:
    async def case():
        first, second = (Server(servers=2, rank=rank, **SESSIONS) for rank in (0, 1))
        await serve(first, session="a", level=0, rank=1)
        assert await serve(second, session="a", level=0) == 1
        await serve(second, session="a", level=0, rank=0)
        assert await serve(first, session="a", level=0) == 0

    run(case)


def test_shared_home_is_one_sessions_for_a_time(folder) -> None:
    first, second = (PeerServers(folder / "counts", 2, rank, 4, 3) for rank in range(2))
    first.move(("t", "a"), 3, now=1e6)
    assert second.home(("t", "a"), 1e6 + 60, memory=60.0) == 3
    assert second.home(("t", "a"), 1e6 + 62, memory=60.0) is None
    assert second.home(("u", "a"), 1e6, memory=60.0) is None
    assert second.others() == [[0, 0, 0]] * 4
    mark = second._homes[second._homes > 0]
    second._homes[:] = mark  # all other places have the entry of this session
    assert second.home(("t", "b"), 1e6, memory=60.0) is None


def test_session_of_a_canary_stays_with_its_policy() -> None:
    async def case():
        server = Server(**SESSIONS)
        server.state.semsched.canaries = 1
        named = [f"session {number % 12}" for number in range(36)]
        engines = [await serve(server, session=session) for session in named]
        assert engines[:12] == engines[12:24] == engines[24:]
        assert set(engines) == {0, 1}

    run(case)
