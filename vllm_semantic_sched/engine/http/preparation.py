"""Urgent requests overtake others before the engine sees them.

vLLM's API server parses, templates and tokenizes requests on one thread, in order of arrival:
behind a burst of fifty, an urgent request would reach the scheduler last. Here a few at a time are
prepared, in the order of their hints or of the instant reader's levels.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vllm_semantic_sched.engine.guard import guarded, logged
from vllm_semantic_sched.engine.http.preparation_queue import PreparationQueue
from vllm_semantic_sched.engine.http.request_context import (
    Message,
    RequestContext,
    incoming,
    state_of,
    tenant_arguments,
    with_argument,
)
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.requests.arrivals import SESSION, read_tenant, session_key
from vllm_semantic_sched.engine.startup.settings import load_settings
from vllm_semantic_sched.engine.vllm_api import other_scheduler
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.decision import (
    SERVICE_TIER,
    Hint,
    read_hints,
    reading_level,
)
from vllm_semantic_sched.policy.facts.job import LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.sessions import SessionKey
from vllm_semantic_sched.predict.instant import InstantReader

_SLOTS = 2  # the second keeps the thread busy while the first waits for the tokenizer's
_LONGEST = 0.05  # seconds after which a request that waits for something slow gives up its slot

_PATHS = ("/completions", "/responses")  # ends of those whose bodies are read ahead
# Bytes of a body that are read ahead. Larger ones hold pictures or whole books: parsing them twice
# would cost milliseconds.
LARGEST_BODY = 2**18

# Bounds on the walk through a request, whatever a client has nested.
_DEEPEST, _MOST_NODES = 8, 4096
_FIRST, _LAST = 64, 448  # of the entries of a list: a chat's newest turn is its last

_TEXT_PARTS = (None, "text", "input_text", "message")

Receive = Callable[[], Awaitable[Message]]


class RequestPreview(NamedTuple):
    """What the body of an HTTP request says, before vLLM has prepared the request."""

    level: int  # by hint or reading, else the default level
    level_from: LevelSource = LevelSource.DEFAULT
    reading: Prediction | None = None  # the instant reader's, unless prompts are read one by one
    user: str | None = None  # the OpenAI field
    has_media: bool = False  # preparing it means to fetch or decode pictures or sound
    hints: Mapping[str, Any] | None = None  # `urgency` and `priority`, as far as it states them
    service_tier: str | None = None  # as it states it, if the policy reads that
    served_tier: str | None = None  # by which it is served, of those of the OpenAI API


@dataclass(frozen=True)
class PreviewRules:
    """How to tell the urgency of an HTTP request at a glance."""

    policy: Policy
    instant: InstantReader | None  # None if the policy does not use it

    @classmethod
    def load(cls, vllm_config: Any) -> Self | None:
        """The rules of a server; None if it does not order by urgency, or only observes. Raises
        PolicyError if the policy is invalid, and as `of`."""
        if other_scheduler(vllm_config) is not None:
            return None
        policy = load_settings(vllm_config.additional_config)
        return cls.of(policy) if policy.uses_urgency and not policy.observe else None

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """The rules of a policy. Raises ValueError if the instant reader is damaged."""
        predictor = policy.predictor
        reads = policy.reads(hinted=False) and predictor.has_instant_reader
        return cls(policy, InstantReader.load(predictor.model) if reads else None)

    def preview(
        self, body: bytes | None, priority: int | None = None, tenant: str | None = None
    ) -> RequestPreview:
        """Read an OpenAI request: as without any field if the body is no JSON object, or None: too
        large to parse twice. `priority` and `tenant`: of the headers, which override the body's."""
        request = None
        with contextlib.suppress(ValueError, RecursionError):
            request = json.loads(body or b"")
        return self.preview_of(request if isinstance(request, dict) else {}, priority, tenant)

    def preview_of(
        self, request: dict[str, Any], priority: int | None = None, tenant: str | None = None
    ) -> RequestPreview:
        """Read an OpenAI request, as parsed; see `preview`."""
        policy = self.policy
        user = request.get("user")
        if priority is None:
            priority = request.get("priority")
        extra = request.get("vllm_xargs")
        service_tier = stated_tier(request, policy)
        hint = read_hints(
            with_argument(extra, SERVICE_TIER, service_tier),
            priority,
            policy.hints,
            policy.levels,
            policy.default_level,
            policy.service_tiers,
            tenant_of(request, tenant),
        )
        texts, has_media = read_user(request)
        reading = None
        level_from = hint.source
        if hint.level is None and self.instant is not None and (text := "\n".join(texts)):
            reading = self.instant.read(text)
            level_from = LevelSource.DEFAULT if reading is None else LevelSource.INSTANT
        level = reading_level(policy, hint, reading)
        if isinstance(request.get("prompt"), list):  # each becomes a request of its own
            reading = None
        hints: dict[str, Any] = {}
        if isinstance(extra, dict) and "urgency" in extra:
            hints["urgency"] = extra["urgency"]
        if isinstance(priority, int):
            hints["priority"] = priority
        return RequestPreview(
            level=level,
            level_from=level_from,
            reading=reading,
            user=user if isinstance(user, str) else None,
            has_media=has_media,
            hints=hints,
            service_tier=service_tier,
            served_tier=served_tier(service_tier, hint, policy),
        )


def stated_tier(request: dict[str, Any], policy: Policy) -> str | None:
    """The `service_tier` of an OpenAI request, in its `vllm_xargs` or as a field; None if it has
    none, or the policy reads none."""
    if not policy.service_tiers:
        return None
    stated = request.get(SERVICE_TIER)
    extra = request.get("vllm_xargs")
    if isinstance(extra, dict):
        stated = extra.get(SERVICE_TIER, stated)
    return stated if isinstance(stated, str) else None


def tenant_of(request: dict[str, Any], header: str | None) -> str:
    """The tenant of an OpenAI request, as the engine will read it."""
    return read_tenant(tenant_arguments(request.get("vllm_xargs"), request.get("user"), header))


def session_of(
    request: dict[str, Any], tenant: str | None, session: str | None
) -> SessionKey | None:
    """The session of an OpenAI request, as the engine will read it; None without one. `tenant` and
    `session`: of the headers, which override the body's."""
    extra = tenant_arguments(request.get("vllm_xargs"), request.get("user"), tenant)
    return session_key(with_argument(extra, SESSION, session))


def served_tier(stated: str | None, hint: Hint, policy: Policy) -> str | None:
    """The tier that an answer names: the stated one if the level is that tier's; None if none is
    stated."""
    if stated is None:
        return None
    by_tier = hint.source is LevelSource.SERVICE_TIER and stated != "auto"
    return stated if by_tier and hint.level == policy.service_tiers[stated] else "default"


def read_user(request: dict[str, Any]) -> tuple[list[str], bool]:
    """What the user says in an OpenAI request for a completion, chat or response, and whether there
    are pictures or sound with it. Visits at most `_MOST_NODES` nodes."""
    texts: list[str] = []
    has_media, nodes = False, 0
    for name in ("prompt", "input", "messages"):
        stack = [iter((request.get(name),))]
        while stack and nodes < _MOST_NODES:
            value = next(stack[-1], stack)
            if value is stack:
                stack.pop()
                continue
            nodes += 1
            if isinstance(value, str):
                texts.append(value)
            elif len(stack) > _DEEPEST:
                continue
            elif isinstance(value, list):
                many = len(value) > _FIRST + _LAST
                stack.append(iter([*value[:_FIRST], *value[-_LAST:]] if many else value))
            elif isinstance(value, dict) and value.get("role", "user") == "user":
                # A message, or a part of one.
                has_media = has_media or value.get("type") not in _TEXT_PARTS
                stack.append(iter((value.get("content", value.get("text")),)))
    return texts, has_media


def asks_for_completion(scope: Any) -> bool:
    """Whether an ASGI scope is a request whose body is read ahead: its text decides its turn."""
    is_post = scope["type"] == "http" and scope["method"] == "POST"
    return bool(is_post and scope["path"].endswith(_PATHS))


async def read_ahead(receive: Receive) -> tuple[bytes | None, Receive]:
    """Read a request until its body is complete, too long, or the client has left. Returns the
    body, if it is complete and no longer than `LARGEST_BODY`, and what the application receives
    from: all messages."""
    messages: list[Message] = []
    body, complete = bytearray(), False
    while len(body) <= LARGEST_BODY and not complete:
        messages.append(message := await receive())
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        complete = not message.get("more_body", False)
    messages.reverse()

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return bytes(body) if complete and len(body) <= LARGEST_BODY else None, replay


class UrgentFirst:
    """ASGI middleware, inside `Refusals`, that passes requests for generated text on in the order
    of their urgency; without the rules that `adopt_rules` stores, at once."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._queue: PreparationQueue[asyncio.Future[None]] = PreparationQueue(_SLOTS)
        self._turns: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer an ASGI request in its turn, with what its body says noted on `incoming`."""
        rules: PreviewRules | None = self._rules(scope)
        request = incoming.get()
        if rules is None or request is None:
            await self._app(scope, receive, send)
            return
        body, receive = await read_ahead(receive)
        preview = self._preview(rules, body, request)
        request.level, request.level_from = preview.level, preview.level_from.value
        request.reading = preview.reading
        request.user, request.hints = preview.user, preview.hints
        request.service_tier = preview.service_tier
        request.served_tier = preview.served_tier
        if preview.has_media:  # it would hold a slot while a picture is fetched
            await self._app(scope, receive, send)
        else:
            await self._in_turn(request, scope, receive, send)

    @guarded(lambda *args: None)
    def _rules(self, scope: Any) -> Any:
        """The rules for a request; None if it passes at once."""
        return state_of(scope["app"]).rules if asks_for_completion(scope) else None

    async def _in_turn(self, request: RequestContext, scope: Any, receive: Any, send: Any) -> None:
        loop = asyncio.get_running_loop()
        came = loop.time()
        turn = loop.create_future()
        self._enter(turn, request, came)
        self._turns.add(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        finally:
            self._turns.discard(turn)
        with contextlib.suppress(Exception):  # a missing figure is no reason to fail
            SemanticStatLogger.in_api_server("preparation_queue").set(len(self._queue))
            SemanticStatLogger.in_api_server("preparation_seconds").observe(loop.time() - came)
        with contextlib.ExitStack() as slot:  # left once, at the first of three events
            slot.callback(self._leave)
            slot.callback(loop.call_later(_LONGEST, slot.close).cancel)
            request.prepared = slot.close
            await self._app(scope, receive, send)

    @guarded(lambda self, turn, *args: turn.set_result(None))
    def _enter(self, turn: asyncio.Future[None], request: RequestContext, came: float) -> None:
        if self._queue.enter(turn, request.level or 0, came, request.tenant or request.user or ""):
            turn.set_result(None)

    def _let_all_in(self) -> None:
        self._queue = PreparationQueue(_SLOTS)
        for turn in self._turns:
            if not turn.done():
                turn.set_result(None)

    @guarded(_let_all_in)
    def _leave(self) -> None:
        while (turn := self._queue.leave()) is not None:
            if not turn.done():
                turn.set_result(None)
                return

    @guarded(lambda self, rules, *args: RequestPreview(rules.policy.default_level))
    def _preview(
        self, rules: PreviewRules, body: bytes | None, request: RequestContext
    ) -> RequestPreview:
        return rules.preview(body, request.priority, request.tenant)


def adopt_rules(app: Any) -> None:
    """Load or reload the rules of an application's server, if they can be read; without any,
    requests keep the order in which they come. Never raises."""
    state = state_of(app)
    with logged("the HTTP server's order of requests stays as it was"):
        vllm_config = getattr(app.state, "vllm_config", None)
        state.rules = None if vllm_config is None else PreviewRules.load(vllm_config)
