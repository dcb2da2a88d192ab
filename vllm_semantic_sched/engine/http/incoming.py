"""One HTTP request as the entry knows it, from its headers and the bounded beginning of its body
to the engine client's `generate`, where everything takes effect that any route can set."""

from __future__ import annotations

import asyncio
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

_PRIORITY_HEADER = b"x-vllm-priority"
"""vLLM's own: overrides the field `priority` of the body, if it is a number."""

# Bodies that are read ahead, because their text decides who is prepared first.
_PATHS = ("/completions", "/responses")


@dataclass(slots=True)
class Incoming:
    """An HTTP request on its way to the engine.

    Attributes:
        tenant: of the header, which overrides what the client says.
        priority: of the header, which overrides the body's; None without a number there.
        user: of the OpenAI field, if the body was read.
        level: by hint or reading; None if nobody looked.
        reading: the instant reader's; None if it did not read the request, or reads its prompts
            one by one.
        stock_placement: whether the client wants vLLM to choose the engine.
        refusals: that occurred while it is answered.
        prepared: called once it is on its way to the engine.
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
        """A request by its headers."""
        headers = dict(scope.get("headers", ()))
        tenant = headers.get(TENANT_HEADER)
        return cls(
            tenant=None if tenant is None else tenant.decode("latin-1"),
            priority=_number(headers.get(_PRIORITY_HEADER)),
            stock_placement=headers.get(PLACEMENT_HEADER) == b"vllm",
        )


def _number(value: bytes | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None


incoming: ContextVar[Incoming | None] = ContextVar("semsched_incoming", default=None)
"""The request of this context."""


@dataclass(slots=True)
class ServerState:
    """What this package keeps on a server's application.

    Attributes:
        rules: to read requests ahead (`preparation.GlanceRules`); None: nobody is.
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
    """The state of an application."""
    state = getattr(app.state, "semsched", None)
    if not isinstance(state, ServerState):
        state = app.state.semsched = ServerState()
    return state


def asks_for_completion(scope: Any) -> bool:
    """Whether an ASGI scope is a request for generated text, of which the body is read ahead."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path.endswith(_PATHS)


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
    overrides a tenant in `vllm_xargs`, which overrides `user`.

    Args:
        user: of the OpenAI request.
        header: value of the tenant header; None if absent.
    """
    known = {} if extra is None else extra
    tenant = header
    if tenant is None and isinstance(known, dict) and "tenant" not in known:
        tenant = user
    if not isinstance(tenant, str) or not isinstance(known, dict):
        return extra
    return {**known, "tenant": tenant}
