"""Urgent requests overtake others before the engine sees them.

vLLM's API server parses, templates and tokenizes requests on one thread, in the order in which they
come: behind a burst of fifty, an urgent request would reach the scheduler last. Here a few requests
at a time are prepared, in the order of their hints, or of the instant reader's levels. The
scheduler decides anew what follows from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vllm_semantic_sched.engine.http.body import asks_for_completion, read_body, replayed
from vllm_semantic_sched.engine.startup.settings import load_settings
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.decision import reading_level
from vllm_semantic_sched.policy.estimates.hints import read_hints
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.preparation import PreparationQueue
from vllm_semantic_sched.predict.instant import InstantReader

logger = logging.getLogger("vllm.semantic_sched")

# The second keeps the thread busy while the first waits for the tokenizer's.
_SLOTS = 2
# A request that waits for something slow, such as a picture from another server, gives up its
# slot.
_LONGEST = 0.1  # seconds
_PACKAGE = "vllm_semantic_sched."

PLACEMENT_HEADER = b"x-semsched-placement"
"""With the value `vllm`, vLLM chooses the engine of the request."""

# Larger bodies hold pictures or whole books; parsing them twice would cost milliseconds.
_LARGEST_BODY = 2**18  # bytes


class Glance(NamedTuple):
    """An HTTP request at a glance.

    Attributes:
        level: by hint or reading, else the default level.
        reading: the instant reader's; None if it did not read the request, or reads its prompts
            one by one.
        stock_placement: whether the client wants vLLM to choose the engine.
    """

    level: int
    reading: Prediction | None = None
    stock_placement: bool = False


@dataclass(frozen=True)
class GlanceRules:
    """How to tell the urgency of an HTTP request at a glance.

    Attributes:
        policy: of the server.
        instant: None if the policy does not use the instant reader.
    """

    policy: Policy
    instant: InstantReader | None

    @classmethod
    def load(cls, vllm_config: Any) -> Self | None:
        """The rules of a server; None if its scheduler does not order by urgency.

        Raises:
            PolicyError: the policy is invalid.
            ValueError: the instant reader is damaged.
        """
        classes = vllm_config.scheduler_config.get_scheduler_cls().__mro__
        if not any(one.__module__.startswith(_PACKAGE) for one in classes):
            return None
        policy = load_settings(vllm_config.additional_config)
        return cls.of(policy) if policy.uses_urgency else None

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """The rules of a policy.

        Raises:
            ValueError: the instant reader is damaged.
        """
        predictor = policy.predictor
        reads = policy.reads(hinted=False) and predictor.instant.enabled
        return cls(policy, InstantReader.load(predictor.model) if reads else None)

    def glance(self, body: bytes) -> Glance:
        """Read an OpenAI request: at the default level if the body is not a JSON object, or too
        large to parse twice."""
        request = None
        if len(body) <= _LARGEST_BODY:
            with contextlib.suppress(ValueError):
                request = json.loads(body)
        if not isinstance(request, dict):
            return Glance(self.policy.default_level)
        return self.glance_at(request)

    def glance_at(self, request: dict[str, Any]) -> Glance:
        """Read an OpenAI request, as parsed."""
        policy = self.policy
        hint = read_hints(
            request.get("vllm_xargs"), request.get("priority"), policy.hints, policy.levels
        )
        if hint.level is not None or self.instant is None:
            return Glance(reading_level(policy, hint, None))
        text = "\n".join(texts_of_user(request))
        reading = self.instant.read(text) if text else None
        several = isinstance(request.get("prompt"), list)  # each becomes a request of its own
        return Glance(reading_level(policy, hint, reading), None if several else reading)


def texts_of_user(request: dict[str, Any]) -> Iterator[str]:
    """What the user says in an OpenAI request for a completion, chat or response."""
    for field in ("prompt", "input", "messages"):
        yield from _texts(request.get(field))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, str):
                yield item
            elif isinstance(item, dict) and item.get("role", "user") == "user":
                # A message, or a part of one.
                yield from _texts(item.get("content", item.get("text")))


class UrgentFirst:
    """ASGI middleware that passes requests for generated text on in the order of their urgency.

    Without the rules that `adopt_rules` stores, requests pass at once.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._queue: PreparationQueue[asyncio.Future[None]] = PreparationQueue(_SLOTS)
        self._failed = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        rules = asks_for_completion(scope) and getattr(
            scope["app"].state, "semsched_glance_rules", None
        )
        if not rules:
            await self._app(scope, receive, send)
            return
        body, ending = await read_body(receive)
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        glance = self._glance(rules, body)
        if dict(scope.get("headers", ())).get(PLACEMENT_HEADER) == b"vllm":
            glance = glance._replace(stock_placement=True)
        if not self._queue.enter(turn, glance.level, loop.time()):
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.leave()
                raise
        slot = _Slot(self, glance)
        token = _slots.set(slot)
        timer = loop.call_later(_LONGEST, slot.leave)
        try:
            await self._app(scope, replayed(body, ending, receive), send)
        finally:
            timer.cancel()
            slot.leave()
            _slots.reset(token)

    def leave(self) -> None:
        """Give a slot to the next request that still waits for one."""
        while (turn := self._queue.leave()) is not None:
            if not turn.done():
                turn.set_result(None)
                return

    def _glance(self, rules: GlanceRules, body: bytes) -> Glance:
        try:
            return rules.glance(body)
        except Exception:
            if not self._failed:  # a traceback for every request would fill the log
                self._failed = True
                logger.exception("Semantic scheduling: a request was not read ahead")
            return Glance(rules.policy.default_level)


class _Slot:
    def __init__(self, queue: UrgentFirst, glance: Glance) -> None:
        self._queue: UrgentFirst | None = queue
        self.glance = glance

    def leave(self) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.leave()


_slots: ContextVar[_Slot | None] = ContextVar("semsched_preparation_slot", default=None)


def is_prepared() -> None:
    """The request of this context is on its way to the engine: others may be prepared."""
    slot = _slots.get()
    if slot is not None:
        slot.leave()


def current_glance() -> Glance | None:
    """The request of this context at a glance; None if nobody looked at it."""
    slot = _slots.get()
    return None if slot is None else slot.glance


def adopt_rules(app: Any) -> None:
    """Load or reload the rules of an application's server. Never raises: if they cannot be read,
    the old ones stay; without any, requests keep the order in which they come."""
    rules = getattr(app.state, "semsched_glance_rules", None)
    try:
        vllm_config = getattr(app.state, "vllm_config", None)
        rules = None if vllm_config is None else GlanceRules.load(vllm_config)
    except Exception:
        logger.exception("Semantic scheduling: the HTTP server's order of requests stays as it was")
    app.state.semsched_glance_rules = rules
