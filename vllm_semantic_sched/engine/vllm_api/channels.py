"""Channels between vLLM's processes: statistics, new requests, utility calls, last outputs."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_semantic_sched.engine.vllm_api import capabilities
from vllm_semantic_sched.engine.vllm_api.capabilities import CARRIER, REQUEST_ERROR
from vllm_semantic_sched.engine.vllm_api.scheduling import HookedScheduler
from vllm_semantic_sched.policy.overload.refusal import Refusal

# Statistics. vLLM's SchedulerStats drops unknown fields on its way between the processes, but some
# of its dictionaries keep any string as a key.

_MARK = "semsched:"


def attach_message(stats: Any, message: dict[str, Any]) -> None:
    """Let a SchedulerStats carry a message of plain values to the API server; a no-op on a vLLM
    without a field that can."""
    if capabilities.HOOKS.custom_stats:
        stats.custom_stats = {_MARK: message}
    elif CARRIER is not None:
        getattr(stats, CARRIER)[_MARK + json.dumps(message)] = 0


def detach_message(stats: Any) -> dict[str, Any] | None:
    """Take the message off a SchedulerStats; None if there is none."""
    if capabilities.HOOKS.custom_stats:
        return (stats.custom_stats or {}).pop(_MARK, None)
    carrier = getattr(stats, CARRIER or "", None) or {}
    text = next((key for key in carrier if key.startswith(_MARK)), None)
    if text is None:
        return None
    del carrier[text]
    return json.loads(text.removeprefix(_MARK))


def ray_metrics() -> tuple[Any, Any, Any]:
    """vLLM's stand-ins for prometheus_client's Counter, Gauge and Histogram, which publish through
    Ray; they put `_` for `:` in names, and add the tag ReplicaId. Needs Ray."""
    from vllm.v1.metrics import ray_wrappers as ray

    return ray.RayCounterWrapper, ray.RayGaugeWrapper, ray.RayHistogramWrapper


_PREPROCESS = EngineCore.preprocess_add_request


def watch_new_requests() -> None:
    """Make the engine of this process call `HookedScheduler.preprocess_request`."""
    if capabilities.HOOKS.utilities:
        return

    def preprocess(core: EngineCore, request: Any) -> Any:
        new = _PREPROCESS(core, request)
        if isinstance(core.scheduler, HookedScheduler):
            core.scheduler.preprocess_request(new[0])
        return new

    setattr(EngineCore, _PREPROCESS.__name__, preprocess)


def refused_output(request: Request, refusal: Refusal) -> EngineCoreOutput:
    """The last output of a request that was ended by `finish_requests`. Without our middleware,
    vLLM answers with the refusal's status if it has the hook, else 0.33 with 503, or 500 if a retry
    is no use, and older ones with 500."""
    code = refusal.code
    error: dict[str, Any] = {}
    if request.sampling_params is None:  # vLLM takes an output without one for a text's
        error["pooling_output"] = torch.empty(0)
    if capabilities.HOOKS.refuse_request:
        error["error"] = REQUEST_ERROR(
            code.value,
            refusal.message,
            status=code.status,
            retry_after=refusal.retry_after_seconds,
        )
    elif capabilities.OUTPUTS_CARRY_ERRORS:
        error["error"] = REQUEST_ERROR(
            code=code.value, message=refusal.to_sentence(), retryable=code.retryable
        )
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        stop_reason=refusal.to_text(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **error,
    )


def add_utility(scheduler: Scheduler, name: str, function: Callable[[Any, Any], Any]) -> None:
    """Let API servers call a function in this engine process (`call_engines`), with the scheduler
    and the argument of the call. It returns plain values or a future of them. vLLM runs it between
    two steps on the scheduling thread, whether the engine is busy, idle or paused. Without the
    hook, it looks the name up among the methods of EngineCore."""
    if capabilities.HOOKS.utilities:
        utilities: Any = scheduler.utilities  # type: ignore[attr-defined]
        utilities[name] = functools.partial(function, scheduler)
        return

    def call(core: EngineCore, argument: Any) -> Any:
        return function(core.scheduler, argument)

    setattr(EngineCore, name, call)


async def call_engines(engine_client: Any, name: str, argument: Any) -> Sequence[Any]:
    """Call a utility (`add_utility`) in every engine process; what each returned."""
    if capabilities.HOOKS.utilities:
        return await engine_client.call_scheduler(name, argument)
    client = engine_client.engine_core
    if hasattr(client, "call_utility_all_async"):
        return await client.call_utility_all_async(name, argument)
    # vLLM 0.31 returns the answer of the first engine only.
    call = functools.partial(client._call_utility_async, name, argument)
    return await asyncio.gather(*(call(engine=engine) for engine in client.core_engines))
