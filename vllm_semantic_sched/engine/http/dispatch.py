"""Passes the reading of each request's text to its engine, and chooses the engine if vLLM runs
several (data parallelism): vLLM's own balancer compares loads and knows no urgency."""

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.http.peer_servers import PeerServers
from vllm_semantic_sched.engine.http.request_context import (
    RequestContext,
    incoming,
    state_of,
    tenant_arguments,
    with_argument,
)
from vllm_semantic_sched.engine.http.stated_times import stated_times
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.requests.arrivals import SESSION, pass_reading, session_key
from vllm_semantic_sched.engine.vllm_api import RANK, engine_count, is_beam
from vllm_semantic_sched.policy.estimates.decision import SERVICE_TIER
from vllm_semantic_sched.policy.placement import Placed, Placement
from vllm_semantic_sched.policy.sessions import Homes, SessionKey


class Dispatch:
    """Counts the requests at each engine by level, those of other API servers too, and chooses by
    that; those of a session go to the same engine while it is worth it. vLLM chooses without rules
    (see `preparation.adopt_rules`), if the policy or the client says so, and for requests for
    several answers, which it spreads over the engines."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._placement = Placement(1, 1)
        self._peers: PeerServers | None = None
        self._homes: Homes[int] = Homes(self._session_memory, time.monotonic)
        self._guard = Guard(SemanticStatLogger.count_in_api_server)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Put tenant and reading into the parameters of the engine client's `generate` or `encode`,
        and an engine into its keyword arguments, unless they have one. Never raises. Call what it
        returns when the request has ended."""
        placed = None
        request = incoming.get()
        params = parameters_in(args, kwargs)
        request_id = args[2] if len(args) > 2 else kwargs.get("request_id", "")
        if request is not None:
            with self._guard("hints"):
                if request.hints and is_beam(request_id):
                    _repeat_hints(request.hints, params, kwargs)
            with self._guard("tenant"):
                name = _extra_name(params)
                given = getattr(params, name, None)
                extra = tenant_arguments(given, request.user, request.tenant)
                extra = with_argument(extra, SERVICE_TIER, request.service_tier)
                extra = with_argument(extra, SESSION, request.session)
                if params is not None and extra is not given:
                    setattr(params, name, extra)
            if request.reading is not None:
                with self._guard("reading"):
                    pass_reading(params, request.reading)
        with self._guard("engine_choice"):
            placed = self._place(request, params, kwargs.get(RANK), str(request_id))
        if placed is None:
            return lambda: None
        kwargs[RANK] = placed.engine
        placement, peers = self._placement, self._peers
        counting = self._guard("engine_counts")
        with counting:
            if peers is not None:
                peers.add(placed.engine, placed.level, 1)

        def ended() -> None:
            with counting:
                placement.leave(placed)
                if peers is not None:
                    peers.add(placed.engine, placed.level, -1)

        return ended

    def _place(
        self, request: RequestContext | None, params: Any, given: int | None, request_id: str
    ) -> Placed | None:
        """Choose an engine, or count at the one that the client names (`given`)."""
        state = state_of(self._app)
        rules, canaries = state.rules, state.canaries
        if not canaries and rules is None:
            return None
        engines = engine_count(self._app.state.vllm_config)
        if engines < 2 or getattr(params, "n", 1) > 1:
            return None
        session = self._session_of(params)
        among = None
        if canaries:
            among = pool_of(_caller(request, session) or request_id, canaries, engines)
        if rules is None:  # an observing server under a canary
            self._count_for(engines, 1)
            return self._placement.place(0, among=among) if given is None else None
        if given is None and request is not None and request.stock_placement:
            return None
        self._count_for(engines, rules.policy.levels)
        level = rules.policy.default_level
        if request is not None and request.level is not None:
            level = request.level
        if given is None:
            placed = self._choose(level, among, session)
        elif 0 <= given < engines:
            placed = self._placement.count(given, level)
        else:
            return None  # vLLM refuses the numbers of engines that do not exist
        if session is not None:
            self._move(session, placed.engine)
        return placed

    def _choose(self, level: int, among: range | None, session: SessionKey | None) -> Placed:
        if self._peers is not None:
            for engine, ahead in enumerate(self._peers.others()):
                self._placement.count_others(engine, ahead)
        home = None if session is None else self._home(session)
        return self._placement.place(level, among, home)

    def _home(self, session: SessionKey) -> int | None:
        """The engine to which a session was sent last, by whichever API server."""
        memory = self._session_memory()
        told = None
        if self._peers is not None and memory is not None:
            told = self._peers.home(session, time.monotonic(), memory)
        return self._homes.of(session) if told is None else told

    def _move(self, session: SessionKey, engine: int) -> None:
        self._homes.move(session, engine)
        if self._peers is not None:
            self._peers.move(session, engine, time.monotonic())

    def _session_memory(self) -> float | None:
        rules = state_of(self._app).rules
        return None if rules is None else rules.policy.sessions.memory

    def _session_of(self, params: Any) -> SessionKey | None:
        """The session of a request, as its engine will read it; None without one, or if the policy
        has no sessions."""
        if self._session_memory() is None:
            return None
        return session_key(getattr(params, _extra_name(params), None))

    def _count_for(self, engines: int, levels: int) -> None:
        """Start to count, and again after vLLM has started or stopped engines."""
        if (engines, levels) == (self._placement.engines, len(self._placement.ahead)):
            return
        self._placement = Placement(engines, levels)
        peers = state_of(self._app).peers
        fits = peers is not None and peers.shape == (engines, levels)
        self._peers = peers if fits else None


def parameters_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The sampling or pooling parameters of a call of `generate` or `encode`."""
    given = kwargs.get("sampling_params", kwargs.get("pooling_params"))
    return args[1] if len(args) > 1 else given


def _extra_name(params: Any) -> str:
    """The attribute of parameters that has the `vllm_xargs`."""
    return "extra_kwargs" if hasattr(params, "extra_kwargs") else "extra_args"


def state_times(request: RequestContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Put the times that a request's headers state into the parameters of a call. ValueError, which
    vLLM answers with status 400, if a time is not valid, in the headers or in `vllm_xargs`."""
    params = parameters_in(args, kwargs)
    name = _extra_name(params)
    given = getattr(params, name, None)
    extra = stated_times(given, request.times)
    if extra is not given:
        setattr(params, name, extra)


def _repeat_hints(hints: Mapping[str, Any], params: Any, kwargs: dict[str, Any]) -> None:
    """Give a beam the hints of the client's request, which vLLM's beam search leaves behind."""
    if "urgency" in hints:
        params.extra_args = {"urgency": hints["urgency"]} | (params.extra_args or {})
    if "priority" in hints:
        kwargs.setdefault("priority", hints["priority"])


def _caller(request: RequestContext | None, session: SessionKey | None) -> str | None:
    """Whose requests stay with one policy under a canary; None if a request names nobody."""
    named = None if request is None else request.user or request.tenant
    return named or (None if session is None else session[1])


def pool_of(session: str, canaries: int, engines: int) -> range:
    """The engines that serve a session under a canary: the first ones run the new policy."""
    digest = hashlib.blake2b(session.encode(), digest_size=8).digest()
    is_new = int.from_bytes(digest, "big") / 2**64 < canaries / engines
    return range(canaries) if is_new else range(canaries, engines)
