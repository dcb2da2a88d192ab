"""Every route of vLLM's that generates goes through the engine client's `generate`, where tenant,
reading and engine are set, and the list of those routes is complete."""

import ast
import asyncio
import logging
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.entrypoints
from fastapi import FastAPI
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched.engine.http.middleware import Middleware
from vllm_semantic_sched.engine.http.request_context import ServerState

pytestmark = pytest.mark.engine

GENERATE = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
    "/inference/v1/generate",
    "/generative_scoring",
    "/v1/systemone",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/realtime",
}
GENERATE_NOTHING = {
    *("/tokenize", "/detokenize", "/ping", "/v1/messages/count_tokens"),
    *("/v1/responses/{response_id}/cancel", "/inference/v1/abort_requests"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply"),
}
TEXT_ONLY = ("/render", "/derender")
"""Ends of the paths that turn requests into tokens and back."""


@pytest.fixture(autouse=True)
def log_level_stays():
    """What vLLM's routers import raises the level of the root logger."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


def routes() -> set[str]:
    routers = pytest.importorskip("vllm.entrypoints.launchers.api_server.routers")
    app = FastAPI()
    app.state.args = Namespace(profiler_config=None, tokens_only=False, enable_sleep_mode=False)
    model = SimpleNamespace(
        is_multimodal_model=True,
        runner_type="generate",
        hf_config=SimpleNamespace(num_labels=1),
        get_pooling_task=lambda tasks: None,
    )
    tasks = ("generate", "transcription", "realtime", "render")
    routers.register_api_routers(Namespace(enable_fault_tolerance=True), app, tasks, model)
    return {
        route.path
        for route in app.routes
        if "POST" in (getattr(route, "methods", None) or ()) or "WebSocket" in type(route).__name__
    }


def test_each_route_is_known_to_generate_or_not() -> None:
    found = {path for path in routes() if not path.endswith(TEXT_ONLY)}
    assert found - GENERATE - GENERATE_NOTHING == set()
    assert GENERATE - found == set()


def test_routes_reach_the_engine_by_its_client_only() -> None:
    folder = Path(vllm.entrypoints.__file__).parent
    ways = []
    for file in folder.rglob("*.py"):
        if {"cli", "offline"} & set(file.relative_to(folder).parts) or file.stem == "llm":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = ast.unparse(node.func.value), node.func.attr
                if name == "generate" and owner.rpartition(".")[2] != "engine_client":
                    ways.append(f"{file.relative_to(folder)}: {owner}.{name}")
    assert ways == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("path", sorted(GENERATE))
def test_header_names_the_tenant_on_each_route(path, kind) -> None:
    """An application with that route alone, on its first request."""
    tenants = []

    async def generate(prompt, sampling_params, request_id, **options):
        tenants.append(sampling_params.extra_args["tenant"])
        yield None

    client = SimpleNamespace(generate=generate)
    app = SimpleNamespace(
        state=SimpleNamespace(semsched=ServerState(routes=True), engine_client=client)
    )

    async def handler(scope, receive, send):
        params = SamplingParams(extra_args={"tenant": "of the client"})
        async for _ in app.state.engine_client.generate("", params, "id"):
            pass

    headers = [(b"x-semsched-tenant", b"of the gateway")]
    scope = {"type": kind, "method": "POST", "path": path, "headers": headers, "app": app}
    asyncio.run(Middleware(handler)(scope, None, None))
    assert tenants == ["of the gateway"]
