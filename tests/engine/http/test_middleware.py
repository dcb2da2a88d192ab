"""The middleware around a fake application: it delays response starts and inserts refusals."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from vllm.exceptions import GenerationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_semantic_sched.engine.http.middleware import Refusals, RequestRefused
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

FULL = Refusal(Code.OVER_CAPACITY, "the queue is full", 3.0)


def output(finish_reason=None, stop_reason=None):
    return SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason=finish_reason, stop_reason=stop_reason)]
    )


REFUSED = output("error", FULL.to_text())
# As a vLLM with patches/0002 raises it.
REFUSED_BY_VLLM = GenerationError(FULL.message)
REFUSED_BY_VLLM.code, REFUSED_BY_VLLM.retry_after = FULL.code.value, 3


class Engine:
    def __init__(self, *outputs) -> None:
        self.outputs = outputs
        self.closed = 0
        self.stopped = False

    async def generate(self):
        try:
            for each in self.outputs:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.closed += 1

    def shutdown(self, timeout=None) -> None:
        self.stopped = True


def answer(engine, app, method="POST", state=None):
    """What a client receives: status, headers, pieces of body."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "app": SimpleNamespace(state=state or SimpleNamespace(engine_client=engine)),
    }
    asyncio.run(Refusals(app)(scope, None, send))
    assert [message["type"] for message in sent[1:]] == ["http.response.body"] * (len(sent) - 1)
    head = sent[0]
    return head["status"], dict(head["headers"]), [message["body"] for message in sent[1:]]


async def head(send, status=200):
    headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"7")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def body(send, text, more=True):
    await send({"type": "http.response.body", "body": text, "more_body": more})


def streaming(engine):
    async def app(scope, receive, send):
        await head(send)
        try:
            async for _ in engine.generate():
                await body(send, b"data: {}\n\n")
        except RequestRefused as error:
            event = json.dumps({"error": {"message": str(error), "code": error.status_code}})
            await body(send, f"data: {event}\n\n".encode())
        await body(send, b"data: [DONE]\n\n")
        await body(send, b"", more=False)

    return app


def assert_refused(status, headers, pieces) -> None:
    assert status == 429
    assert headers[b"retry-after"] == b"3"
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"x-request-id"] == b"7"  # what other middleware said stays
    assert int(headers[b"content-length"]) == len(pieces[0])
    assert len(pieces) == 1
    assert json.loads(pieces[0])["error"]["code"] == "over_capacity"


@pytest.mark.parametrize("refused", [REFUSED, REFUSED_BY_VLLM])
def test_stream_refused_before_its_first_token_gets_a_status(refused) -> None:
    engine = Engine(refused)
    assert_refused(*answer(engine, streaming(engine)))


@pytest.mark.parametrize("refused", [REFUSED, REFUSED_BY_VLLM, GenerationError(FULL.to_sentence())])
def test_refusal_replaces_a_plain_answer(refused) -> None:
    engine = Engine(refused)

    async def app(scope, receive, send):
        try:
            async for _ in engine.generate():
                pass
        except RequestRefused:
            await head(send, status=500)
            await body(send, b'{"error": "Internal server error"}', more=False)

    assert_refused(*answer(engine, app))


def test_refusal_in_another_task_is_seen() -> None:
    engine = Engine(REFUSED)

    async def app(scope, receive, send):
        await asyncio.create_task(streaming(engine)(scope, receive, send))

    assert_refused(*answer(engine, app))


@pytest.mark.parametrize("refused", [REFUSED, REFUSED_BY_VLLM])
def test_stream_refused_later_ends_with_the_error_and_its_code(refused) -> None:
    engine = Engine(output(), output(), refused)
    status, headers, pieces = answer(engine, streaming(engine))
    assert status == 200 and b"retry-after" not in headers
    assert pieces[:2] == [b"data: {}\n\n"] * 2
    assert json.loads(pieces[2].removeprefix(b"data: ")) == FULL.body()
    assert pieces[3:] == [b"data: [DONE]\n\n", b""]


def test_rest_of_a_refused_request_is_aborted() -> None:
    engine = Engine(REFUSED, output(), output("stop"))
    assert_refused(*answer(engine, streaming(engine)))
    assert engine.closed == 1


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_other_answers_pass_unchanged(method) -> None:
    engine = Engine(output(), output("stop", "</s>"))
    status, headers, pieces = answer(engine, streaming(engine), method)
    assert status == 200 and headers[b"content-type"] == b"text/event-stream"
    assert pieces == [b"data: {}\n\n"] * 2 + [b"data: [DONE]\n\n", b""]


@pytest.mark.parametrize("failed", [output("error"), GenerationError("no memory")])
def test_errors_of_vllm_keep_their_status(failed) -> None:
    engine = Engine(failed)

    async def app(scope, receive, send):
        try:
            async for _ in engine.generate():
                pass
        except GenerationError as error:
            assert error is failed
        await head(send, status=500)
        await body(send, b"{}", more=False)

    assert answer(engine, app)[0] == 500


def test_engine_client_is_wrapped_once() -> None:
    engine = Engine(REFUSED)
    for _ in range(3):
        assert_refused(*answer(engine, streaming(engine)))
    assert engine.closed == 3


def plain(engine, before=lambda: None):
    """An application that answers with status 500 if the engine fails."""

    async def app(scope, receive, send):
        try:
            async for _ in engine.generate():
                before()
        except (EngineDeadError, EngineGenerateError, RequestRefused):
            await head(send, status=500)
            await body(send, b"{}", more=False)
            return
        await head(send)
        await body(send, b"{}", more=False)

    return app


def test_request_that_a_stop_cuts_off_is_told_to_come_again() -> None:
    engine = Engine(output(), EngineDeadError())
    state = SimpleNamespace(engine_client=engine)
    app = plain(engine, before=lambda: engine.shutdown(timeout=30))
    status, headers, pieces = answer(engine, app, state=state)
    assert engine.stopped
    assert status == 503 and int(headers[b"retry-after"]) >= 1
    assert json.loads(pieces[0])["error"]["code"] == "stopping"
    # One that comes afterwards does not reach vLLM, which could not even tokenize it.
    status, headers, pieces = answer(engine, None, state=state)
    assert status == 503 and int(headers[b"retry-after"]) >= 1
    assert json.loads(pieces[0])["error"]["code"] == "stopping"


@pytest.mark.parametrize("timeout", [0.05, 0])
def test_request_that_is_not_done_ends_before_the_engine_does(timeout) -> None:
    engine = Engine()
    ended = threading.Event()
    queue = asyncio.Queue()
    engine.output_processor = SimpleNamespace(propagate_error=queue.put_nowait)

    async def generate():  # like vLLM's, which waits for what is put into the request's queue
        yield output()
        await queue.get()
        ended.set()
        raise EngineGenerateError

    def shutdown(timeout):  # vLLM kills the engine at the deadline
        engine.ended_before = timeout and ended.wait(60)

    engine.generate, engine.shutdown = generate, shutdown

    def stop() -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: engine.shutdown(timeout=timeout))

    status, _, pieces = answer(engine, plain(engine, before=stop))
    assert engine.ended_before == bool(timeout)
    assert status == 503 and json.loads(pieces[0])["error"]["code"] == "stopping"


def test_request_that_finishes_during_a_stop_is_answered() -> None:
    engine = Engine(output(), output("stop"))
    app = plain(engine, before=lambda: engine.shutdown(timeout=30))
    assert answer(engine, app)[0] == 200


def test_engine_that_dies_by_itself_is_an_error() -> None:
    engine = Engine(EngineDeadError())
    assert answer(engine, plain(engine))[0] == 500


def test_answer_without_a_body_is_sent() -> None:
    async def app(scope, receive, send):
        await head(send, status=204)

    assert answer(None, app)[0] == 204
