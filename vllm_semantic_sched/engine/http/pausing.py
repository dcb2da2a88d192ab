"""Operator endpoints that stop and resume the engine: pause, sleep, reload weights, drop caches."""

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, FastAPI, HTTPException, Request

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import logged, logger
from vllm_semantic_sched.engine.http.request_context import state_of
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger

_LEASE = 600.0  # seconds after which a pause ends by itself
_LONGEST_LEASE = 86_400.0

Reply = dict[str, Any]
router = APIRouter()
"""Without a prefix and without access control: `admin.router` includes it, and has both."""


def engine_of(request: Request) -> Any:
    """vLLM's engine client, by which the server of an HTTP request reaches its engines."""
    return request.app.state.engine_client


@router.post("/pause")
async def pause(
    request: Request,
    mode: Annotated[Literal["wait", "keep"], Body(embed=True)] = "wait",
    seconds: Annotated[float, Body(embed=True, gt=0, le=_LONGEST_LEASE)] = _LEASE,
) -> Reply:
    """Stop starting requests, and answer once nothing runs any more: `wait` lets running requests
    finish, `keep` freezes them. Queued requests stay queued, new ones join them, and all caches are
    kept. The server resumes by itself after `seconds`, unless it is paused again: whoever paused it
    may be gone."""
    _lease(request.app, seconds)
    await vllm_api.pause(engine_of(request), mode)
    return {"paused": True}


@router.post("/resume")
async def resume(request: Request) -> Reply:
    """Resume after `pause`."""
    await engine_of(request).resume_generation()
    _lease(request.app, None)
    return {"paused": False}


def _lease(app: FastAPI, seconds: float | None, paused: bool = False) -> None:
    """Let a pause end after so many seconds; None: it has ended, or must not end by itself
    (`paused`)."""
    state = state_of(app)
    if state.lease is not None:
        state.lease.cancel()
        state.lease = None
    if seconds is not None:
        loop = asyncio.get_running_loop()
        state.lease = loop.call_later(seconds, lambda: loop.create_task(_end_lease(app)))
    show_paused(paused or seconds is not None)


async def _end_lease(app: FastAPI) -> None:
    logger.warning("Semantic scheduling: the pause lease expired; resuming")
    with logged("the server is still paused"):
        await app.state.engine_client.resume_generation()
        show_paused(False)


def show_paused(paused: bool) -> None:
    """Show on /metrics whether the server is paused."""
    with logged("the pause is not shown on /metrics"):
        SemanticStatLogger.in_api_server("paused").set(float(paused))


@router.post("/sleep")
async def sleep(request: Request, level: Annotated[Literal[1, 2], Body(embed=True)] = 1) -> Reply:
    """Release the accelerator's memory (vLLM's sleep mode); call `pause` first. Level 1 keeps the
    weights on the host, 2 drops them. Frozen requests and host copies of KV are recomputed after
    waking. `asleep` is 0 where the platform has no sleep mode: then the server is only paused."""
    await engine_of(request).sleep(level=level, mode="keep")
    _lease(request.app, None, paused=True)  # it sleeps until it is woken
    asleep = level if vllm_api.has_sleep_mode() else 0
    state_of(request.app).weights_dropped = asleep == 2
    return {"asleep": asleep}


@router.post("/wake")
async def wake(request: Request) -> Reply:
    """Wake up and resume. Weights that sleep has dropped are loaded again before: vLLM would go on
    with whatever their memory holds."""
    engine = engine_of(request)
    state = state_of(request.app)
    if state.weights_dropped:
        await engine.wake_up(["weights"])
        await engine.collective_rpc("reload_weights")
        awake = await engine.wake_up(["kv_cache"])
        state.weights_dropped = False
    else:
        awake = await engine.wake_up()
    _lease(request.app, None)
    return {"awake": awake}


@router.post("/weights/reload")
async def reload_weights(request: Request) -> Reply:
    """Reload the served model's weights from their source; call `pause` first. Everything computed
    with the old ones is dropped before: prefix cache, host copies, KV of frozen requests. If that
    fails, the old weights stay."""
    await drop_caches(request)
    # It must not resume with a part of the new weights.
    _lease(request.app, None, paused=True)
    try:
        await engine_of(request).collective_rpc("reload_weights")
    finally:
        _lease(request.app, _LEASE)
    return {"reloaded": True}


@router.post("/caches/drop")
async def drop_caches(request: Request) -> Reply:
    """Drop everything computed with replaced weights or adapters; call `pause` first."""
    engine = engine_of(request)
    if not await engine.is_paused():
        raise HTTPException(409, "pause first: requests are running")
    try:
        dropped = await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except Exception as error:  # vLLM raises while a load from the host is in flight
        logger.warning("Semantic scheduling: caches could not be dropped: %s", error)
        dropped = False
    if not dropped:
        raise HTTPException(
            503, "KV is still in use or loading from the host; let running requests finish first"
        )
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()
    return {"dropped": True}
