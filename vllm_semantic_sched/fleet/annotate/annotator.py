"""Reads level and expected output length from a request, with the instant reader and, over HTTP,
with the predictor; in a session after what the session said last."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from aiohttp import web

from vllm_semantic_sched.engine.guard import guarded, logger
from vllm_semantic_sched.engine.http.preparation import (
    read_user,
    session_of,
    stated_tier,
    tenant_of,
)
from vllm_semantic_sched.engine.http.request_context import (
    SESSION_HEADER,
    TENANT_HEADER,
    with_argument,
)
from vllm_semantic_sched.fleet.gateways import GATEWAYS
from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.estimates.decision import (
    SERVICE_TIER,
    predicted_level,
    read_hints,
    reading_level,
)
from vllm_semantic_sched.policy.estimates.length import DEFAULT_TOKENS, expected_output_tokens
from vllm_semantic_sched.policy.facts.job import Floor, LevelSource, SessionTurn
from vllm_semantic_sched.policy.facts.prediction import MAX_BATCH, Prediction
from vllm_semantic_sched.policy.sessions import Sessions
from vllm_semantic_sched.predict.instant import InstantReader
from vllm_semantic_sched.predict.process import threads_of
from vllm_semantic_sched.predict.window import continued, newest_words

if TYPE_CHECKING:
    from vllm_semantic_sched.predict.model import TextPredictor

# As in the HTTP server of vLLM: larger bodies hold pictures or whole books.
_LARGEST_BODY = 2**18  # bytes; aiohttp answers larger ones with 413


class Annotation(NamedTuple):
    """The level and the length of a request."""

    level: int  # of its hint, else of the predictor, else of the reading, else the default one
    tokens: float  # expected output
    reading: Prediction | None  # the instant reader's, provisional; None without a text
    source: str  # of the level, a value of `LevelSource`


class Annotator:
    """Annotates requests; without `instant`, levels come from hints only. Remembers sessions as an
    engine does. `clock`: seconds."""

    def __init__(
        self,
        policy: Policy,
        instant: InstantReader | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self._instant = instant
        self._clock = clock
        self._sessions = Sessions(PolicyRef(policy))
        self.failures: Counter[str] = Counter()  # by method

    @classmethod
    def load(cls, policy: str) -> Self:
        """For a policy, by name or path; ValueError if it or the instant reader is invalid."""
        loaded = load_policy(policy)
        return cls(loaded, InstantReader.load(loaded.predictor.model))

    def _default(self, *args: Any, **named: Any) -> Annotation:
        source = LevelSource.DEFAULT.value
        return Annotation(self.policy.default_level, float(DEFAULT_TOKENS), None, source)

    def _no_turn(self, *args: Any, **named: Any) -> SessionTurn | None:
        return None

    @guarded(_no_turn)
    def begin(
        self,
        request: dict[str, Any],
        tenant: str | None = None,
        session: str | None = None,
    ) -> SessionTurn | None:
        """The turn of a request in its session, for `annotate`; None if it names none, or the
        policy has none. What it says is kept for the next one. `tenant` and `session`: of the
        headers, which override the body's. Never raises."""
        if self.policy.sessions.memory is None:
            return None
        key = session_of(request, tenant, session)
        if key is None:
            return None
        now = self._clock()
        turn = self._sessions.begin(*key, now)
        turn.words = newest_words(_newest_message(request) or self.text_of(request))
        self._sessions.arrived(turn, now)
        return turn

    @staticmethod
    def text_of(request: dict[str, Any], turn: SessionTurn | None = None) -> str:
        """The text of `{"text": ...}` or of an OpenAI request, after the last words of its session
        unless the request brings its own; empty without one."""
        given = request.get("text")
        text = given if isinstance(given, str) else "\n".join(read_user(request)[0])
        if turn is None or not text or _newest_message(request):
            return text
        return continued(text, turn.earlier)

    @guarded(_default)
    def annotate(
        self,
        request: dict[str, Any],
        prediction: Prediction | None = None,
        tenant: str | None = None,
        turn: SessionTurn | None = None,
    ) -> Annotation:
        """Annotate `{"text": ...}` or an OpenAI request. Never raises; a request that cannot be
        read gets the default level and length. `prediction`: the predictor's, if it has read the
        text. `tenant`: of the header, which overrides the body's. `turn`: see `begin`."""
        policy = self.policy
        hint = read_hints(
            with_argument(request.get("vllm_xargs"), SERVICE_TIER, stated_tier(request, policy)),
            request.get("priority"),
            policy.hints,
            policy.levels,
            policy.default_level,
            policy.service_tiers,
            tenant_of(request, tenant),
        )
        text = self.text_of(request, turn)
        reading = self._instant.read(text) if text and self._instant is not None else None
        if hint.level is not None:
            level, source = hint.level, hint.source
        elif prediction is not None and not prediction.unreadable:
            level, source = predicted_level(policy, prediction), LevelSource.PREDICTION
        else:
            level, source = reading_level(policy, hint, reading), LevelSource.INSTANT
            if reading is None or reading.unreadable:
                source = LevelSource.DEFAULT
        if turn is not None:
            floor = turn.inherited(level, source)
            if floor is not None:
                level, source = floor.level, LevelSource.SESSION
            self._sessions.decided(turn, Floor(level, "", source, self._clock()))
        tokens = self._tokens(request, prediction or reading)
        return Annotation(level, tokens, reading, source.value)

    def _tokens(self, request: dict[str, Any], reading: Prediction | None) -> float:
        given = (request.get("max_completion_tokens"), request.get("max_tokens"))
        limits = [number for number in given if type(number) is int and number > 0]
        limit = min(limits, default=sys.maxsize)
        if self._instant is None or reading is None or reading.length is None:
            return float(min(DEFAULT_TOKENS, limit))
        buckets = self._instant.length_buckets
        return expected_output_tokens(reading.length, buckets, 0, "mean", limit)

    def answer(
        self,
        request: dict[str, Any],
        prediction: Prediction | None = None,
        tenant: str | None = None,
        turn: SessionTurn | None = None,
    ) -> dict[str, Any]:
        """The annotation as plain values, with the fields for each gateway; see `annotate`."""
        annotation = self.annotate(request, prediction, tenant, turn)
        reading = annotation.reading
        return {
            "level": annotation.level,
            "source": annotation.source,
            "tokens": round(annotation.tokens, 1),
            "provisional": reading and {"urgency": reading.urgency, "length": reading.length},
            "gateways": {
                name: fields(self.policy, annotation.level, annotation.tokens)._asdict()
                for name, fields in GATEWAYS.items()
            },
        }


def _newest_message(request: dict[str, Any]) -> str:
    """The user's last message in a chat that has several of them; else empty."""
    for name in ("input", "messages"):
        messages = request.get(name)
        newest = ""
        for message in reversed(messages if isinstance(messages, list) else []):
            text = "\n".join(read_user({name: [message]})[0])
            if newest and text.strip():
                return newest
            newest = newest or text.strip()
    return ""


class Reader:
    """Reads texts with the predictor on a thread of its own, those that wait together."""

    def __init__(self, predictor: TextPredictor) -> None:
        self._predictor = predictor
        self._waiting: list[tuple[str, asyncio.Future[Prediction | None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def read(self, text: str) -> Prediction | None:
        """The prediction for a text; None if reading fails."""
        answer: asyncio.Future[Prediction | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_waiting())
        return await answer

    async def _read_waiting(self) -> None:
        while self._waiting:
            batch = self._waiting[:MAX_BATCH]
            del self._waiting[:MAX_BATCH]
            texts = [text for text, _ in batch]
            predictions: list[Prediction | None]
            try:
                predictions = [*await asyncio.to_thread(self._predictor.predict, texts)]
            except Exception as error:
                logger.warning("annotate: a text was not read: %s: %s", type(error).__name__, error)
                predictions = [None] * len(batch)
            for (_, answer), prediction in zip(batch, predictions, strict=True):
                if not answer.done():  # its client may have gone
                    answer.set_result(prediction)


def load_reader(policy: Policy) -> Reader | None:
    """The predictor of a policy; None if it reads no texts, or torch is not installed."""
    if not policy.predictor.enabled or importlib.util.find_spec("torch") is None:
        return None
    from vllm_semantic_sched.predict.model import TextPredictor

    return Reader(TextPredictor.load(policy.predictor.model, threads_of(policy.predictor)))


def make_app(annotator: Annotator, reader: Reader | None = None) -> web.Application:
    """POST /annotate, and GET /health. A body that is not a JSON object gets status 400. `reader`:
    None for the instant reader alone."""

    async def annotate(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": "the body must be a JSON object"}, status=400)
        tenant = request.headers.get(TENANT_HEADER.decode())
        turn = annotator.begin(body, tenant, request.headers.get(SESSION_HEADER.decode()))
        text = annotator.text_of(body, turn)
        prediction = await reader.read(text) if reader is not None and text else None
        return web.json_response(annotator.answer(body, prediction, tenant, turn))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=_LARGEST_BODY)
    app.add_routes([web.post("/annotate", annotate), web.get("/health", health)])
    return app
