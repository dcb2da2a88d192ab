"""One HTTP request as the middleware knows it, from its headers to the engine client's `generate`;
and what is kept for an application."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_semantic_sched.engine.http.peer_servers import PeerServers
from vllm_semantic_sched.engine.http.stated_times import read_headers
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import Refusal

Message = MutableMapping[str, Any]

TENANT_HEADER = b"x-semsched-tenant"  # set by a gateway that has authenticated the client
LEVEL_HEADER = b"x-semsched-level"  # of the answer
PLACEMENT_HEADER = b"x-semsched-placement"  # with the value `vllm`, vLLM chooses the engine
SESSION_HEADER = b"x-session-id"  # of vLLM and gateways
_PRIORITY_HEADER = b"x-vllm-priority"  # vLLM's own


@dataclass(slots=True)
class RequestContext:
    """An HTTP request on its way to the engine. What headers say overrides the body."""

    tenant: str | None = None  # of the header
    session: str | None = None  # of the header
    priority: int | None = None  # of the header, if it is a number
    user: str | None = None  # of the OpenAI field, if the body was read
    hints: Mapping[str, Any] | None = None  # `urgency` and `priority`, if the body was read
    service_tier: str | None = None  # see `preparation.RequestPreview`
    served_tier: str | None = None
    level: int | None = None  # by hint or reading, if the body was read
    level_from: str | None = None  # its origin, see `LevelSource`
    reading: Prediction | None = None  # see `preparation.RequestPreview`
    times: Mapping[str, str] = field(default_factory=dict)  # headers of `stated_times`
    stock_placement: bool = False  # the client wants vLLM to choose the engine
    refusals: list[Refusal] = field(default_factory=list)  # that occurred while it is answered
    prepared: Callable[[], None] | None = None  # to be called once it is on its way to the engine

    @classmethod
    def of(cls, scope: Any) -> Self:
        """The headers of an ASGI scope. A priority that is not a whole number counts as absent."""
        headers = dict(scope.get("headers", ()))
        tenant, priority = headers.get(TENANT_HEADER), None
        session = headers.get(SESSION_HEADER)
        with contextlib.suppress(KeyError, ValueError):
            priority = int(headers[_PRIORITY_HEADER])
        return cls(
            tenant=None if tenant is None else tenant.decode("latin-1"),
            session=None if session is None else session.decode("latin-1"),
            priority=priority,
            times=read_headers(headers),
            stock_placement=headers.get(PLACEMENT_HEADER) == b"vllm",
        )


# The request of this context.
incoming: ContextVar[RequestContext | None] = ContextVar("semsched_incoming", default=None)


@dataclass(slots=True)
class ServerState:
    """What this package keeps on a server's application."""

    rules: Any = None  # `preparation.PreviewRules`; None: requests are not read ahead
    peers: PeerServers | None = None  # the other API servers
    ready: bool = False  # all predictors have been up
    stopping: bool = False  # vLLM stops the engines; requests in them may finish
    routes: bool = False  # the routes have been added
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # else nobody keeps them
    lease: asyncio.TimerHandle | None = None  # ends a pause
    weights_dropped: bool = False  # the engines sleep without their weights
    canaries: int = 0  # engines, from the first on, with a canary's new policy all the time


def state_of(app: Any) -> ServerState:
    """The state on an application, added at the first call."""
    state = getattr(app.state, "semsched", None)
    if not isinstance(state, ServerState):
        state = app.state.semsched = ServerState()
    return state


def with_argument(extra: Any, name: str, value: str | None) -> Any:
    """The `vllm_xargs` of a request with an entry; the object itself if the value is None."""
    known = {} if extra is None else extra
    if value is None or not isinstance(known, dict):
        return extra
    return {**known, name: value}


def tenant_arguments(extra: Any, user: Any, header: str | None) -> Any:
    """The `vllm_xargs` of a request with its tenant; the object itself if there is none. The header
    (None if absent) overrides a tenant in `vllm_xargs`, which overrides the OpenAI field `user`."""
    known = {} if extra is None else extra
    if not isinstance(known, dict):
        return extra
    tenant = user if header is None and "tenant" not in known else header
    return {**known, "tenant": tenant} if isinstance(tenant, str) else extra
