"""The ASGI middleware: HTTP statuses for refusals, urgent requests first in the HTTP server too,
the choice of an engine, operator endpoints, and tenants by header or `user` field.

Most of it happens at the engine client's `generate` and `encode`, which all routes to a model call.
Without the middleware vLLM answers a refused request with status 500 (since 0.33: 503), or with an
error message inside a stream of status 200.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.http.admin import LONGEST_ID, add_routes
from vllm_semantic_sched.engine.http.dispatch import Dispatch, state_times
from vllm_semantic_sched.engine.http.preparation import UrgentFirst
from vllm_semantic_sched.engine.http.request_context import (
    LEVEL_HEADER,
    Message,
    RequestContext,
    ServerState,
    incoming,
    state_of,
)
from vllm_semantic_sched.engine.http.stopping import watch_stop
from vllm_semantic_sched.engine.vllm_api import (
    STOPPED_ERRORS,
    GenerationError,
    Unauthorized,
    encode_with_rank,
)
from vllm_semantic_sched.policy.overload.refusal import STOPPING, Refusal, refusal_of

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Any, Send], Awaitable[None]]
Outputs = AsyncGenerator[Any, None]

SERVICE_TIER_HEADER = b"x-semsched-service-tier"  # of an answer
_NO_TIER = b'"service_tier":null'  # in the body of vLLM's answers
STREAMED_ERROR = b'data: {"error"'  # start of the event by which vLLM's streams report an error


class RequestRefused(GenerationError):
    """Raised by the engine's `generate` in place of an output that carries a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.status_code = HTTPStatus(refusal.code.status)


def collect_refusals() -> list[Refusal]:
    """A list that gets the refusals of the request that this context answers from now on."""
    incoming.set(request := RequestContext())
    return request.refusals


class Middleware:
    """What users name in `--middleware`. vLLM adds it outside its own authentication. A request
    that authentication would refuse passes at once: not a byte of its body is read here."""

    def __init__(self, app: App) -> None:
        self._stock = app
        self._unauthorized = Unauthorized(app)
        self._app = Refusals(UrgentFirst(app))

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer an ASGI request; without the API key that vLLM requires, as vLLM does."""
        await (self._app if self._takes(scope) else self._stock)(scope, receive, send)

    @guarded(lambda *args: False)
    def _takes(self, scope: Any) -> bool:
        """Whether vLLM's authentication lets a request in."""
        # The first message is the earliest access to the application that vLLM builds.
        add_routes(scope["app"])
        return not self._unauthorized(scope)


class Refusals:
    """Answers a refused request with its status, Retry-After and an error body with a stable code:
    the head of a response waits for the first part of its body. A stream that is refused after its
    first token gets the error body as its last event but one. A server that stops refuses all."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer an ASGI request; only POST requests and websockets can be refused."""
        streamed = scope["type"] == "websocket"  # has no status to replace
        if not streamed and (scope["type"] != "http" or scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        request = self._begin(scope)
        token = incoming.set(request)
        try:
            response = _Response(send, request)
            if not streamed and state_of(scope["app"]).stopping:
                await response.refuse({}, STOPPING)
                return
            await self._app(scope, receive, send if streamed else response.send)
            await response.flush()
        finally:
            incoming.reset(token)

    @guarded(lambda *args: RequestContext(tenant=""))  # no tenant of the client's choice
    def _begin(self, scope: Any) -> RequestContext:
        watch(scope["app"])
        return RequestContext.of(scope)


class _Response:
    """Forwards what the application sends, with the level that the request arrived with and the
    tier that served it, or the refusal in its place."""

    def __init__(self, send: Send, request: RequestContext) -> None:
        self._send = send
        self._request = request
        self._refusals = request.refusals
        self._head: Message | None = None
        self._replaced = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = self._with_level(message)
        elif self._replaced:
            pass
        elif self._head is not None and self._refusals:
            self._replaced = True
            await self.refuse(self._head, self._refusals[0])
        else:
            if self._head is not None and self._request.served_tier is not None:
                self._head, message = name_tier(self._head, message, self._request.served_tier)
            await self.flush()
            if self._refusals and bytes(message.get("body", b"")).startswith(STREAMED_ERROR):
                event = f"data: {json.dumps(self._refusals[0].body())}\n\n"
                message = {**message, "body": event.encode()}
            await self._send(message)

    @guarded(lambda self, head: head)
    def _with_level(self, head: Message) -> Message:
        request = self._request
        if request.level is None or request.level_from is None:
            return head
        value = f"{request.level}; {request.level_from}".encode()
        return {**head, "headers": [*head.get("headers", ()), (LEVEL_HEADER, value)]}

    async def flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._replaced:
            await self._send(head)

    async def refuse(self, head: Message, refusal: Refusal) -> None:
        """Send a refusal, with the headers of `head` that do not contradict it."""
        body = json.dumps(refusal.body()).encode()
        own = {"content-type": "application/json", "content-length": str(len(body))}
        own |= refusal.headers()
        kept = [
            (name, value)
            for name, value in head.get("headers", ())
            if name.decode("latin-1").lower() not in own
        ]
        headers = kept + [(name.encode(), value.encode()) for name, value in own.items()]
        start = {"type": "http.response.start", "status": refusal.code.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


@guarded(lambda head, message, tier: (head, message))
def name_tier(head: Message, message: Message, tier: str) -> tuple[Message, Message]:
    """The head of a response and the first part of its body, with the service tier: in a header,
    and in place of the null that vLLM writes, if this part is the whole body."""
    if head["status"] != HTTPStatus.OK:
        return head, message
    headers = [*head.get("headers", ()), (SERVICE_TIER_HEADER, tier.encode())]
    body = bytes(message.get("body", b""))
    # The text of an answer cannot have this: its quotation marks are escaped.
    named = body.replace(_NO_TIER, _NO_TIER.replace(b"null", json.dumps(tier).encode()), 1)
    if named != body and not message.get("more_body", False):
        message = {**message, "body": named}
        headers = [
            (name, str(len(named)).encode() if name.lower() == b"content-length" else value)
            for name, value in headers
        ]
    return {**head, "headers": headers}, message


def watch(app: Any) -> None:
    """Wrap `generate` and `encode` of an application's engine client, once: they tell `UrgentFirst`
    of a request prepared, let `Dispatch` choose its engine, and raise RequestRefused for a refused
    one, and for one that is not done when the server stops."""
    engine_client = getattr(app.state, "engine_client", None)
    if engine_client is None or getattr(engine_client, "semsched_watched", False):
        return
    dispatch = Dispatch(app)
    state = state_of(app)
    engine_client.generate = _watched(engine_client.generate, dispatch, state)
    if hasattr(engine_client, "encode"):
        engine_client.encode = _watched(encode_with_rank(engine_client), dispatch, state)
    if hasattr(engine_client, "shutdown"):
        watch_stop(engine_client, state)
    engine_client.semsched_watched = True


def _watched(
    call: Callable[..., Outputs], dispatch: Dispatch, state: ServerState
) -> Callable[..., Outputs]:
    async def outputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
        # Counted here, not before: an iterator that is never started never ends.
        leave = dispatch.prepare(args, kwargs)
        try:
            # Closing it ends the other answers of the request.
            async with aclosing(call(*args, **kwargs)) as outputs:
                async for output in outputs:
                    if (refusal := refusal_of(output)) is not None:
                        raise _refused(refusal)
                    yield output
        # In place of the output: since vLLM 0.33, or with patches/0002, whose error has the status.
        except GenerationError as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise _refused(refusal) from error
        except STOPPED_ERRORS as error:
            if not state.stopping:
                raise
            raise _refused(STOPPING) from error
        finally:
            leave()

    def watched(*args: Any, **kwargs: Any) -> Outputs:
        if (request := incoming.get()) is not None and request.prepared is not None:
            request.prepared()
        request_id = args[2] if len(args) > 2 else kwargs.get("request_id", "")
        if isinstance(request_id, str) and len(request_id) > LONGEST_ID:
            raise ValueError(
                f"request_id: {len(request_id)} characters; at most {LONGEST_ID} are allowed"
            )
        if request is not None:
            state_times(request, args, kwargs)
        return outputs_of(args, kwargs)

    return watched


def _refused(refusal: Refusal) -> RequestRefused:
    if (request := incoming.get()) is not None:
        request.refusals.append(refusal)
    return RequestRefused(refusal)
