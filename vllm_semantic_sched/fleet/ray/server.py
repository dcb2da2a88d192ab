"""A Ray Serve LLM replica: refusals with their status, load by level, policy reload, metrics."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.serve.llm import LLMServer

from vllm_semantic_sched.engine.guard import logged
from vllm_semantic_sched.engine.http.admin import ask_engines, reload_engines
from vllm_semantic_sched.engine.http.middleware import (
    STREAMED_ERROR,
    RequestRefused,
    collect_refusals,
    watch,
)
from vllm_semantic_sched.engine.http.request_context import (
    SESSION_HEADER,
    TENANT_HEADER,
    tenant_arguments,
    with_argument,
)
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.requests.arrivals import SESSION
from vllm_semantic_sched.engine.startup.settings import PolicyFile, parse_settings
from vllm_semantic_sched.fleet.ray.choice import STATS_KEY, load_of
from vllm_semantic_sched.policy.overload.refusal import Refusal

_RELOAD_SECONDS = 2.0  # between looks at the policy file
_STREAMED_ERROR = STREAMED_ERROR.decode()
Parts = AsyncGenerator[Any, None]


class UrgencyServer(LLMServer):
    """Ray's `LLMServer` around the semantic scheduler. vLLM's HTTP application does not run here,
    so neither does our middleware: this class does its work. The policy is reloaded within seconds
    of a change of its file."""

    async def start(self) -> None:
        """Called by Ray: start the engine, then watch its policy file."""
        SemanticStatLogger.through_ray = True
        await super().start()
        self._application = SimpleNamespace(state=self.engine._app_state)
        self._client = self.engine._app_state.engine_client
        watch(self._application)
        self._number = 0
        self._reloading = asyncio.create_task(self._reload_on_change())

    async def chat(self, request: Any, raw_request_info: Any = None) -> Parts:
        """Called by Ray: the answer to `/v1/chat/completions`, in parts."""
        return await self._answer(super().chat, request, raw_request_info)

    async def completions(self, request: Any, raw_request_info: Any = None) -> Parts:
        """Called by Ray: the answer to `/v1/completions`, in parts."""
        return await self._answer(super().completions, request, raw_request_info)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray at intervals: the load, for `UrgencyRouter`."""
        stats: dict[str, Any] = dict(await super().record_routing_stats())
        with contextlib.suppress(Exception):  # the engine is starting, stuck or dead
            stats[STATS_KEY] = load_of(await ask_engines(self._client, "status"), self._number)
            self._number = stats[STATS_KEY]["number"]
        return stats

    async def semsched_status(self) -> dict[str, Any]:
        """Requests and policy of this replica's engines."""
        replica = serve.get_replica_context().replica_id.unique_id
        engines = await ask_engines(self._client, "status")
        return {"replica": replica, "pid": os.getpid(), "engines": engines}

    async def reload_policy(self) -> list[dict[str, Any]]:
        """Reload the policy file on this replica; the outcome on each of its engines."""
        return await reload_engines(self._client)

    async def _answer(self, run: Callable[..., Awaitable[Parts]], request: Any, info: Any) -> Parts:
        headers = {} if info is None else info.headers
        tenant = headers.get(TENANT_HEADER.decode())
        session = headers.get(SESSION_HEADER.decode())
        extra = tenant_arguments(request.vllm_xargs, request.user, tenant)
        request.vllm_xargs = with_argument(extra, SESSION, session)
        refusals = collect_refusals()  # before `run`, which may start a task
        return with_refusals(await run(request, info), refusals)

    async def _reload_on_change(self) -> None:
        file = PolicyFile(parse_settings(self._client.vllm_config.additional_config).policy)
        while True:
            await asyncio.sleep(_RELOAD_SECONDS)
            with logged("the policy was not reloaded"):
                if await asyncio.to_thread(file.has_changed):
                    await self.reload_policy()  # the engines log the result


def _error(refusal: Refusal) -> ErrorResponse:
    # Ray passes an error on as message, type and status. The type carries the whole refusal, so
    # that the ingress can answer with its code and Retry-After.
    return ErrorResponse(
        error=ErrorInfo(message=refusal.message, type=refusal.to_text(), code=refusal.code.status)
    )


async def with_refusals(parts: Parts, refusals: list[Refusal]) -> Parts:
    """Pass on what an `LLMServer` answers (a response, or events of a stream, one by one or in
    lists), with the request's refusal (see `collect_refusals`) in place of vLLM's error: before the
    first token as Ray's `error` response, streamed or not, later as the stream's last event but
    one."""
    started = False
    try:
        async for part in parts:
            if refusals:
                events = part if isinstance(part, list) else [part]
                if not started and _is_error(events[0]):
                    yield _error(refusals[0])
                    return
                refused = f"data: {json.dumps(refusals[0].body())}\n\n"
                replaced = [refused if _is_error(event) else event for event in events]
                part = replaced if isinstance(part, list) else replaced[0]
            started = True
            yield part
    except RequestRefused as error:
        yield _error(error.refusal)
    finally:
        await parts.aclose()


def _is_error(event: Any) -> bool:
    return isinstance(event, str) and event.startswith(_STREAMED_ERROR)
