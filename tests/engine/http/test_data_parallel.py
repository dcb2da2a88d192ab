"""Two engines behind one real server: placement by urgency, reload and refusals of both."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from contextlib import contextmanager

import psutil
import pytest
from metrics_page import UNENDING, page_value, wait_until

from vllm_semantic_sched.operate.client import AdminClient

pytestmark = pytest.mark.engine

POLICY = """
base: priority
levels: 3
default_level: 1
predictor: {enabled: false}
preemption: {enabled: false}
"""
BOUNDED = POLICY + "admission: {queue: {requests: 1}}\n"
SEATS = 4
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "mine.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture(scope="module")
def server(serve, policy):
    settings = json.dumps({"semantic_sched": {"policy": str(policy)}})
    arguments = ["--scheduler-cls", "vllm_semantic_sched.SemanticScheduler"]
    arguments += ["--middleware", "vllm_semantic_sched.Middleware"]
    arguments += ["--additional-config", settings, "--data-parallel-size", "2"]
    # As many API servers as engines, as vLLM starts them unless it is told otherwise.
    arguments += ["--distributed-executor-backend", "uni"]
    return serve(*arguments, seats=SEATS, longest=UNENDING)


@pytest.fixture(autouse=True)
def idle(server):
    """Requests of the test before have gone."""
    wait_until(lambda: not page_value(server, "vllm:num_requests_running"))


def body(tokens: int, level: int, **more) -> bytes:
    fields = {"model": "bench", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(fields | {"vllm_xargs": {"urgency": level}} | more).encode()


def ask(server, level: int, rank: int | None = None, tokens: int = 4) -> int:
    """One request; the status of its answer."""
    headers = JSON if rank is None else JSON | {"X-data-parallel-rank": str(rank)}
    request = urllib.request.Request(server.url + "/v1/completions", body(tokens, level), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def running(server, level: int, rank: int | None = None):
    """A request that runs until the end of the block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = JSON if rank is None else JSON | {"X-data-parallel-rank": str(rank)}
    connection.request("POST", "/v1/completions", body(UNENDING, level, stream=True), headers)
    reply = connection.getresponse()
    assert reply.status == 200
    reply.fp.readline()
    try:
        yield
    finally:
        connection.close()


def served(server) -> list[float]:
    """Answers so far, by engine."""
    name, reason = "vllm:request_success_total", {"finished_reason": "length"}
    return [page_value(server, name, engine=str(rank), **reason) for rank in (0, 1)]


def chosen(server, level: int) -> int:
    """The engine to which the next request of a level goes."""
    before = served(server)
    assert ask(server, level) == 200
    wait_until(lambda: sum(served(server)) > sum(before))
    return [after - then for after, then in zip(served(server), before, strict=True)].index(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_a_client_names_is_kept(server, rank) -> None:
    before = served(server)
    assert [ask(server, 1, rank) for _ in range(3)] == [200] * 3
    wait_until(lambda: served(server)[rank] == before[rank] + 3)
    assert served(server)[1 - rank] == before[1 - rank]


def test_rank_that_does_not_exist_is_a_bad_request(server) -> None:
    assert ask(server, 1, rank=7) == 400


@pytest.mark.parametrize("rank", [0, 1])
def test_urgent_request_avoids_the_engine_of_another_urgent_one(server, rank) -> None:
    with running(server, 0, rank):
        for _ in range(3):
            assert chosen(server, 0) == 1 - rank


@pytest.mark.parametrize("rank", [0, 1])
def test_less_urgent_work_is_no_reason_to_avoid_an_engine(server, rank) -> None:
    """Two requests of level 2 run on one engine, one of level 0 on the other."""
    with running(server, 2, rank), running(server, 2, rank), running(server, 0, 1 - rank):
        assert chosen(server, 0) == rank
        assert chosen(server, 2) == 1 - rank


def test_reload_and_full_queue_429_work_on_both_engines(server, policy) -> None:
    admin = AdminClient(server.url)
    policy.write_text(BOUNDED)
    try:
        admin.post("/policy/reload")
        status = admin.status()
        assert [engine["engine"] for engine in status] == [0, 1]
        assert {engine["policy"]["version"] for engine in status} == {2}
        with contextlib.ExitStack() as held:
            for rank in (*[1] * SEATS, 0):
                held.enter_context(running(server, 0, rank))
            waiting = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            headers = JSON | {"X-data-parallel-rank": "1"}
            waiting.request("POST", "/v1/completions", body(4, 1), headers)
            wait_until(lambda: page_value(server, "vllm:num_requests_waiting", engine="1") == 1)
            assert ask(server, 1, rank=1) == 429
            assert ask(server, 1, rank=0) == 200
        assert waiting.getresponse().status == 200
    finally:
        policy.write_text(POLICY)
        admin.post("/policy/reload")


def test_metrics_page_has_both_engines(server) -> None:
    for rank in (0, 1):
        assert ask(server, 1, rank) == 200
        wait_until(lambda: page_value(server, "semsched:requests_total", engine=str(rank)) > 0)  # noqa: B023


def test_death_of_an_engine_ends_the_server_and_nothing_hangs(server) -> None:
    """The last test: vLLM ends all engines with the first one that dies."""
    leader = psutil.Process(server.pid)
    engines = [one for one in leader.children(recursive=True) if "EngineCore" in one.name()]
    assert len(engines) == 2
    answers = []
    for rank in (0, 1):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        headers = JSON | {"X-data-parallel-rank": str(rank)}
        connection.request("POST", "/v1/completions", body(UNENDING, 0, stream=True), headers)
        answers.append(connection.getresponse())
    engines[1].kill()
    for answer in answers:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer.read()  # ends, with an error or short
    leader.wait(240)
