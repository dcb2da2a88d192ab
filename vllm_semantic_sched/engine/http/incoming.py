"""One HTTP request as the middleware knows it, from its headers and the bounded beginning of its
body to the engine client's `generate`; and what is kept for an application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm_semantic_sched.engine.http.siblings import Siblings
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

TENANT_HEADER = b"x-semsched-tenant"
"""Set by a gateway that has authenticated the client."""

PLACEMENT_HEADER = b"x-semsched-placement"
"""With the value `vllm`, vLLM chooses the engine of the request."""

LARGEST_BODY = 2**18
"""Bytes of a body that are read ahead. Larger ones hold pictures or whole books: parsing them twice
would cost milliseconds."""

_PRIORITY_HEADER = b"x-vllm-priority"  # vLLM's own
_PATHS = ("/completions", "/responses")  # ends of those whose bodies are read ahead


@dataclass(slots=True)
class Incoming:
    """An HTTP request on its way to the engine.

    Attributes:
        tenant, priority: of the headers, which override the body's.
        user: of the OpenAI field, if the body was read.
        level: by hint or reading; None if the body was not read.
        reading: see `preparation.Glance`.
        stock_placement: whether the client wants vLLM to choose the engine.
        refusals: that occurred while it is answered.
        prepared: to be called once it is on its way to the engine.
    """

    tenant: str | None = None
    priority: int | None = None
    user: str | None = None
    level: int | None = None
    reading: Prediction | None = None
    stock_placement: bool = False
    refusals: list[Refusal] = field(default_factory=list)
    prepared: Callable[[], None] | None = None

    @classmethod
    def of(cls, scope: Any) -> Incoming:
        headers = dict(scope.get("headers", ()))
        tenant, priority = headers.get(TENANT_HEADER), None
        with contextlib.suppress(KeyError, ValueError):
            priority = int(headers[_PRIORITY_HEADER])
        return cls(
            tenant=None if tenant is None else tenant.decode("latin-1"),
            priority=priority,
            stock_placement=headers.get(PLACEMENT_HEADER) == b"vllm",
        )


incoming: ContextVar[Incoming | None] = ContextVar("semsched_incoming", default=None)
"""The request of this context."""


@dataclass(slots=True)
class ServerState:
    """What this package keeps on a server's application.

    Attributes:
        rules: to read requests ahead (`preparation.GlanceRules`); None: not read.
        siblings: the other API servers.
        ready: whether all predictors have been up.
        routes: whether the routes are there.
        tasks: kept, or the event loop would let go of them.
        lease: ends a pause.
        canaries: how many engines, from the first on, run a canary's new policy all the time.
    """

    rules: Any = None
    siblings: Siblings | None = None
    ready: bool = False
    routes: bool = False
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    lease: asyncio.TimerHandle | None = None
    canaries: int = 0


def state_of(app: Any) -> ServerState:
    state = getattr(app.state, "semsched", None)
    if not isinstance(state, ServerState):
        state = app.state.semsched = ServerState()
    return state


def asks_for_completion(scope: Any) -> bool:
    """Whether an ASGI scope is a request whose body is read ahead: its text decides its turn."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return bool(is_post and scope["path"].endswith(_PATHS))


class BodyAhead:
    """The beginning of a body, read ahead of the application, which receives all of it.

    Attributes:
        whole: the body, if it is complete and no longer than `LARGEST_BODY`; else None.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: list[Message] = []
        self.whole: bytes | None = None

    async def read(self) -> None:
        """Read until the body is complete, too long, or the client has left."""
        parts: list[bytes] = []
        length = 0
        while length <= LARGEST_BODY:
            message = await self._receive()
            self._read.append(message)
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if not message.get("more_body", False):
                self.whole = b"".join(parts) if length <= LARGEST_BODY else None
                break
        self._read.reverse()

    async def replay(self) -> Message:
        """What the application receives: the messages that were read, then the rest."""
        return self._read.pop() if self._read else await self._receive()


def tenant_arguments(extra: Any, user: Any, header: str | None) -> Any:
    """The `vllm_xargs` of a request with its tenant; the object itself if there is none. The header
    (None if absent) overrides a tenant in `vllm_xargs`, which overrides the OpenAI field `user`."""
    known = {} if extra is None else extra
    if not isinstance(known, dict):
        return extra
    tenant = user if header is None and "tenant" not in known else header
    return {**known, "tenant": tenant} if isinstance(tenant, str) else extra
