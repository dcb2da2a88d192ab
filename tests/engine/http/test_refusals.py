"""Overload on real servers: responses to clients with and without the middleware."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import vllm
from metrics_page import UNENDING, page_value, wait_until

from vllm_semantic_sched.engine.vllm_api.capabilities import HOOKS

pytestmark = pytest.mark.engine

POLICY = """
base: priority
levels: 4
default_level: 1
predictor: {enabled: false}
preemption: {enabled: false}
dedup: waiting
deadlines: {stated: true}
admission: {queue: {requests: 4}}
tiers:
  - name: premium
  - name: standard
    queue: {requests: 2}
  - name: batch
  - name: background
    queue: {timeout: 2.0}
"""
SEATS = 2
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WAYS = [(path, stream) for path in (COMPLETIONS, CHAT) for stream in (False, True)]


class Answer(NamedTuple):
    status: int
    headers: dict
    text: str
    seconds: float

    @property
    def error(self) -> dict:
        return json.loads(self.text)["error"]


def ask(
    server,
    path=COMPLETIONS,
    stream=False,
    tier=1,
    max_tokens=4,
    key=None,
    xargs=None,
    **body,
) -> Answer:
    hints = {"urgency": tier} | ({"dedup_key": key} if key else {}) | (xargs or {})
    body = {"prompt": "hello"} | body if path == COMPLETIONS else body
    body = body if path == COMPLETIONS else body | {"messages": [{"role": "user", "content": "hi"}]}
    body |= {"model": "bench", "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body | {"vllm_xargs": hints}).encode(),
        {"Content-Type": "application/json"},
    )
    begin = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, headers, text = reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, headers, text = error.code, error.headers, error.read().decode()
    names = {name.lower(): value for name, value in headers.items()}
    return Answer(status, names, text, time.monotonic() - begin)


class PendingRequests:
    """Requests in progress, each in its own thread."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._threads: list[threading.Thread] = []

    def ask(self, server, **fields) -> None:
        thread = threading.Thread(target=lambda: self.answers.append(ask(server, **fields)))
        thread.start()
        self._threads.append(thread)

    def join(self) -> list[Answer]:
        for thread in self._threads:
            thread.join()
        return self.answers


@contextmanager
def full_seats(server, waiting: int = 0):
    """Take all seats and let `waiting` requests of tier 1 wait; they are answered afterwards."""
    wait_until(lambda: not page_value(server, "vllm:num_requests_running"))
    holders = [open_stream(server) for _ in range(SEATS)]
    pending = PendingRequests()
    for _ in range(waiting):
        pending.ask(server, tier=1)
    wait_until(lambda: page_value(server, "vllm:num_requests_waiting") == waiting)
    try:
        yield
    finally:
        for holder in holders:
            holder.close()
    assert [answer.status for answer in pending.join()] == [200] * waiting


def open_stream(server) -> http.client.HTTPConnection:
    """A long request of tier 0 with its first token; ends when the connection is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"model": "bench", "prompt": "x", "max_tokens": UNENDING, "ignore_eos": True}
    body |= {"stream": True, "vllm_xargs": {"urgency": 0}}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", COMPLETIONS, json.dumps(body), headers)
    reply = connection.getresponse()
    assert reply.status == 200
    reply.fp.readline()
    return connection


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("policy") / "small.yaml"
    path.write_text(POLICY)
    return json.dumps({"semantic_sched": {"policy": str(path)}})


@pytest.fixture(scope="module")
def server(serve, settings):
    """With the middleware, in two API servers."""
    arguments = ["--scheduler-cls", "vllm_semantic_sched.SemanticScheduler"]
    arguments += ["--additional-config", settings, "--api-server-count", "2"]
    arguments += ["--middleware", "vllm_semantic_sched.Middleware"]
    return serve(*arguments, seats=SEATS, longest=UNENDING)


@pytest.fixture(scope="module")
def bare(serve, settings):
    """Without the middleware."""
    arguments = ["--scheduler-cls", "vllm_semantic_sched.SemanticScheduler"]
    return serve(*arguments, "--additional-config", settings, seats=SEATS, longest=UNENDING)


def assert_refused(answer: Answer, status: int, code: str) -> None:
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    error = answer.error
    assert error["code"] == code and error["message"] and error["type"]
    assert error["retry_after"] == int(answer.headers["retry-after"])


def test_full_queue_returns_429_with_and_without_streaming(server) -> None:
    with full_seats(server, waiting=2):
        answers = [ask(server, path, stream) for path, stream in WAYS for _ in range(2)]
        for answer in answers:
            assert_refused(answer, 429, "over_capacity")
            assert "at most 2 requests may wait" in answer.error["message"]
    for path, stream in WAYS:
        assert ask(server, path, stream).status == 200


def test_full_queue_replaces_least_urgent_by_more_urgent(server) -> None:
    lesser, urgent = PendingRequests(), PendingRequests()
    with full_seats(server, waiting=2):
        for _ in range(2):
            lesser.ask(server, tier=2, stream=True)
        wait_until(lambda: page_value(server, "vllm:num_requests_waiting") == 4)
        urgent.ask(server, tier=0, stream=True)
        wait_until(lambda: lesser.answers)
        assert_refused(lesser.answers[0], 429, "over_capacity")
    assert urgent.join()[0].status == 200
    assert sorted(answer.status for answer in lesser.join()) == [200, 429]


def test_queue_timeout_returns_408(server) -> None:
    pending = PendingRequests()
    with full_seats(server):
        for path, stream in WAYS:
            pending.ask(server, path=path, stream=stream, tier=3)
        for answer in pending.join():
            assert_refused(answer, 408, "queue_timeout")


def test_deadline_that_cannot_be_kept_returns_429_and_one_that_could(server) -> None:
    with full_seats(server):
        for path, stream in WAYS:
            answer = ask(server, path, stream, max_tokens=60, xargs={"deadline_ms": 1})
            assert_refused(answer, 429, "deadline")
            assert answer.error["deadline_ms"] > 1


def test_time_that_is_no_number_returns_400_and_names_the_field(server) -> None:
    for path, stream in WAYS:
        answer = ask(server, path, stream, xargs={"deadline_ms": "soon"})
        assert answer.status == 400
        message = "deadline_ms must be a positive number of milliseconds, got 'soon'"
        assert message in answer.error["message"]


def test_newer_request_supersedes_a_waiting_one(server) -> None:
    older, newer = PendingRequests(), PendingRequests()
    with full_seats(server):
        older.ask(server, key="page 7", stream=True)
        wait_until(lambda: page_value(server, "vllm:num_requests_waiting") == 1)
        # Two prompts are one request: they do not supersede each other.
        newer.ask(server, key="page 7", prompt=["hello", "good day"])
        (answer,) = older.join()
        assert_refused(answer, 429, "superseded")
        assert answer.headers["x-should-retry"] == "false"
    (answer,) = newer.join()
    assert answer.status == 200
    assert len(json.loads(answer.text)["choices"]) == 2


def test_several_answers_to_one_prompt_end_together(server) -> None:
    with full_seats(server, waiting=2):
        for stream in (False, True):
            assert_refused(ask(server, stream=stream, n=3), 429, "over_capacity")


def test_flood_is_fully_answered_and_service_recovers(server) -> None:
    flood = PendingRequests()
    with full_seats(server):  # however slowly the threads start, the queue gets full
        for number in range(80):
            path, stream = WAYS[number // 4 % 4]
            flood.ask(server, path=path, stream=stream, tier=number % 4, max_tokens=60)
        wait_until(lambda: any(answer.status == 429 for answer in flood.answers))
    answers = flood.join()
    counted = Counter(answer.status for answer in answers)
    assert sum(counted.values()) == 80 and set(counted) <= {200, 408, 429}
    assert counted[200] > 0 and counted[429] > 0
    for answer in answers:
        assert answer.status == 200 or int(answer.headers["retry-after"]) >= 1
    assert ask(server).status == 200
    assert not page_value(server, "vllm:num_requests_waiting")


def test_refusals_are_counted_over_all_api_servers(server) -> None:
    ask(server)  # statistics come with steps
    for code in ("over_capacity", "queue_timeout", "superseded"):
        wait_until(
            lambda code=code: page_value(server, "semsched:refused_requests_total", code=code) > 0
        )
    assert page_value(server, "semsched:policy_errors_total") == 0
    assert page_value(server, "semsched:ended_requests_total", outcome="refused") == (
        page_value(server, "semsched:refused_requests_total")
    )


def test_refusal_without_middleware_is_500_or_stream_error(bare) -> None:
    status = 429 if HOOKS.refuse_request else 500
    with full_seats(bare, waiting=2):
        for path, stream in WAYS:
            answer = ask(bare, path, stream)
            if stream:
                assert answer.status == 200
                assert '"error"' in answer.text or vllm.__version__ < "0.32"  # 0.31 says nothing
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.status == status and "error" in json.loads(answer.text)
    assert ask(bare).status == 200
