"""The annotator as a stateless HTTP endpoint: POST /annotate, and GET /health."""

from __future__ import annotations

import json

from aiohttp import web

from vllm_semantic_sched.fleet.annotate.annotator import Annotator

# As in the HTTP server of vLLM: larger bodies hold pictures or whole books.
_LARGEST_BODY = 2**18  # bytes; aiohttp answers larger ones with 413


def make_app(annotator: Annotator) -> web.Application:
    """The application. A body that is not a JSON object gets status 400."""

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
