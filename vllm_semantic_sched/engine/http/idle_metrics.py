"""Publishes what an engine without requests has to report: vLLM's statistics come with steps."""

import asyncio
from typing import Any

from vllm_semantic_sched.engine.guard import Guard
from vllm_semantic_sched.engine.http.commands import UTILITY
from vllm_semantic_sched.engine.http.request_context import state_of
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.vllm_api import call_engines

_SECONDS = 5.0  # between two reports; Prometheus scrapes every few seconds

_guard = Guard(SemanticStatLogger.count_in_api_server)


async def publish_regularly(app: Any) -> None:
    """Publish the reports of all engines of an application's server, until it stops."""
    while not (state_of(app).stopping or app.state.engine_client.errored):
        await publish(app)
        await asyncio.sleep(_SECONDS)


async def publish(app: Any) -> None:
    """Publish now what all engines have to report. Never raises."""
    with _guard("statistics"):
        for engine, message in await call_engines(app.state.engine_client, UTILITY, "report"):
            if message is not None:
                SemanticStatLogger.publish(str(engine), message)
