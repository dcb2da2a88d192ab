"""A Ray Serve LLM replica: refusals with their status, load by level, policy reload, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorInfo, ErrorResponse
from ray.serve.llm import LLMServer

from vllm_semantic_sched.engine.http.admin import ask_engines, reload_engines
from vllm_semantic_sched.engine.http.incoming import TENANT_HEADER, tenant_arguments
from vllm_semantic_sched.engine.http.middleware import collect_refusals, watch
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.startup.policy_file import PolicyFile
from vllm_semantic_sched.engine.startup.settings import parse_settings
from vllm_semantic_sched.fleet.ray.answers import with_refusals
from vllm_semantic_sched.fleet.ray.choice import ReplicaLoad
from vllm_semantic_sched.policy.overload.refusal import Refusal

logger = logging.getLogger("ray.serve")

_RELOAD_SECONDS = 2.0  # between looks at the policy file


class UrgencyServer(LLMServer):
    """Ray's `LLMServer` around the semantic scheduler. vLLM's HTTP application does not run here,
    so neither does our middleware: this class does its work. The policy is reloaded within seconds
    of a change of its file."""

    async def start(self) -> None:
        """Start the engine."""
        SemanticStatLogger.publish_through_ray()
        await super().start()
        self._application = SimpleNamespace(state=self.engine._app_state)
        self._client = self.engine._app_state.engine_client
        watch(self._application)
        self._number = 0
        self._reloading = asyncio.create_task(self._reload_on_change())

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """See `LLMServer.chat`."""
        return await self._answer(super().chat, request, raw_request_info)

    async def completions(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """See `LLMServer.completions`."""
        return await self._answer(super().completions, request, raw_request_info)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray at intervals: the load, for `UrgencyRouter`."""
        stats: dict[str, Any] = dict(await super().record_routing_stats())
        with contextlib.suppress(Exception):  # the engine is starting, stuck or dead
            load = ReplicaLoad.of_engines(await self._ask("status"), self._number)
            self._number = load.number
            stats |= load.to_stats()
        return stats

    async def semsched_status(self) -> dict[str, Any]:
        """Requests and policy of this replica's engines."""
        replica = serve.get_replica_context().replica_id.unique_id
        return {"replica": replica, "pid": os.getpid(), "engines": await self._ask("status")}

    async def reload_policy(self) -> list[dict[str, Any]]:
        """Reload the policy file on this replica; the outcome on each of its engines."""
        reports: list[dict[str, Any]] = await reload_engines(self._client)
        return reports

    async def _answer(
        self,
        run: Callable[..., Awaitable[AsyncGenerator[Any, None]]],
        request: Any,
        info: Any,
    ) -> AsyncGenerator[Any, None]:
        header = None if info is None else info.headers.get(TENANT_HEADER.decode())
        request.vllm_xargs = tenant_arguments(request.vllm_xargs, request.user, header)
        refusals = collect_refusals()  # before `run`, which may start a task
        return with_refusals(await run(request, info), refusals, _error)

    async def _ask(self, command: str) -> list[Any]:
        return await ask_engines(self._client, command)

    async def _reload_on_change(self) -> None:
        config = self._client.vllm_config.additional_config
        file = PolicyFile(parse_settings(config).policy)
        while True:
            await asyncio.sleep(_RELOAD_SECONDS)
            try:
                if await asyncio.to_thread(file.has_changed):
                    await self.reload_policy()  # the engines log the result
            except Exception:
                logger.exception("Semantic scheduling: the policy was not reloaded")


def _error(refusal: Refusal) -> ErrorResponse:
    code = refusal.code.status
    return ErrorResponse(
        error=ErrorInfo(message=refusal.message, type=refusal.to_text(), code=code)
    )
