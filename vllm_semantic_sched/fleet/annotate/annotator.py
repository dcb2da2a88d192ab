"""Reads level and expected output length from a request, with the instant reader alone; also as a
stateless HTTP endpoint."""

import json
import sys
from collections import Counter
from typing import Any, NamedTuple, Self

from aiohttp import web

from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.http.preparation import read_user
from vllm_semantic_sched.fleet.gateways import GATEWAYS
from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.estimates.decision import read_hints, reading_level
from vllm_semantic_sched.policy.estimates.length import DEFAULT_TOKENS, expected_output_tokens
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.predict.instant import InstantReader

# As in the HTTP server of vLLM: larger bodies hold pictures or whole books.
_LARGEST_BODY = 2**18  # bytes; aiohttp answers larger ones with 413


class Annotation(NamedTuple):
    """The level and the length of a request."""

    level: int  # of its hint, else of the reading, else the default one
    tokens: float  # expected output
    reading: Prediction | None  # the instant reader's, provisional; None without a text


class Annotator:
    """Annotates requests; without `instant`, levels come from hints only."""

    def __init__(self, policy: Policy, instant: InstantReader | None) -> None:
        self.policy = policy
        self._instant = instant
        self.failures: Counter[str] = Counter()  # by method

    @classmethod
    def load(cls, policy: str) -> Self:
        """For a policy, by name or path; ValueError if it or the instant reader is invalid."""
        loaded = load_policy(policy)
        return cls(loaded, InstantReader.load(loaded.predictor.model))

    def _default(self, request: dict[str, Any]) -> Annotation:
        return Annotation(self.policy.default_level, float(DEFAULT_TOKENS), None)

    @guarded(_default)
    def annotate(self, request: dict[str, Any]) -> Annotation:
        """Annotate `{"text": ...}` or an OpenAI request. Never raises; a request that cannot be
        read gets the default level and length."""
        policy = self.policy
        hint = read_hints(
            request.get("vllm_xargs"),
            request.get("priority"),
            policy.hints,
            policy.levels,
            policy.default_level,
        )
        given = request.get("text")
        text = given if isinstance(given, str) else "\n".join(read_user(request)[0])
        reading = self._instant.read(text) if text and self._instant is not None else None
        level = reading_level(policy, hint, reading)
        return Annotation(level, self._tokens(request, reading), reading)

    def _tokens(self, request: dict[str, Any], reading: Prediction | None) -> float:
        given = (request.get("max_completion_tokens"), request.get("max_tokens"))
        limits = [number for number in given if type(number) is int and number > 0]
        limit = min(limits, default=sys.maxsize)
        if self._instant is None or reading is None or reading.length is None:
            return float(min(DEFAULT_TOKENS, limit))
        buckets = self._instant.length_buckets
        return expected_output_tokens(reading.length, buckets, 0, "mean", limit)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The annotation as plain values, with the fields for each gateway."""
        annotation = self.annotate(request)
        reading = annotation.reading
        return {
            "level": annotation.level,
            "tokens": round(annotation.tokens, 1),
            "provisional": reading and {"urgency": reading.urgency, "length": reading.length},
            "gateways": {
                name: fields(self.policy, annotation.level, annotation.tokens)._asdict()
                for name, fields in GATEWAYS.items()
            },
        }


def make_app(annotator: Annotator) -> web.Application:
    """POST /annotate, and GET /health. A body that is not a JSON object gets status 400."""

    async def annotate(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": "the body must be a JSON object"}, status=400)
        return web.json_response(annotator.answer(body))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(client_max_size=_LARGEST_BODY)
    app.add_routes([web.post("/annotate", annotate), web.get("/health", health)])
    return app
