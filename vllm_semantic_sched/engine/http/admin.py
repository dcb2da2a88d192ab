"""Operator endpoints under /v1/semsched, /semsched/ready for probes, the watch on the policy file.

The operator endpoints reload the server's own policy file and weights, pause, sleep and report.
No request can name a file. They answer requests from the server's own machine only, with the
server's API key if it has one, and with a token that only users who may read the server's own files
have (`operate.token`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import signal
import threading
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Request

from vllm_semantic_sched.engine.http.commands import UTILITY
from vllm_semantic_sched.engine.http.incoming import state_of
from vllm_semantic_sched.engine.http.preparation import adopt_rules
from vllm_semantic_sched.engine.http.siblings import Siblings, join_siblings
from vllm_semantic_sched.engine.live_policy import hangup_may_reload
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.startup.policy_file import PolicyFile
from vllm_semantic_sched.engine.startup.settings import parse_settings
from vllm_semantic_sched.engine.vllm_api import call_engines
from vllm_semantic_sched.predict.shared import TOKEN_HEADER, admin_token

logger = logging.getLogger("vllm.semantic_sched")

PREFIX = "/v1/semsched"  # vLLM requires the API key under /v1
_WATCH_SECONDS = 5.0  # between two looks at the policy file
_FOLLOW_SECONDS = 0.5  # between two looks for the reloads of other API servers
_LEASE = 600.0  # seconds after which a pause ends by itself
_LONGEST_LEASE = 86_400.0


def _from_this_machine(request: Request) -> None:
    """Reject requests from other machines, and those that a local proxy or web page relays."""
    relayed = {"forwarded", "x-forwarded-for", "x-real-ip", "origin"} & set(request.headers)
    if request.client is None:  # a Unix socket
        local = True
    else:
        try:
            local = ipaddress.ip_address(request.client.host).is_loopback
        except ValueError:
            local = not request.client.host
    if relayed or not local or not _names_this_machine(request.headers.get("host", "")):
        raise HTTPException(403, "these endpoints answer on the server's own machine only")
    token = admin_token((request.scope.get("server") or ("", 0))[1] or 0)
    given = request.headers.get(TOKEN_HEADER, "")
    if token is None or not secrets.compare_digest(token.encode(), given.encode()):
        raise HTTPException(
            403, f"{TOKEN_HEADER} is missing or wrong: run the command as the server's user"
        )


def _names_this_machine(host: str) -> bool:
    """Whether a Host header is an address or localhost: a web page that rebinds its own name to
    this machine cannot send that."""
    name = urlsplit(f"//{host}").hostname or ""
    if name in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


router = APIRouter(prefix=PREFIX, dependencies=[Depends(_from_this_machine)])
probes = APIRouter()
"""Answered to any machine, without the API key."""


def add_routes(app: FastAPI) -> None:
    """Add the endpoints and load the rules of `UrgentFirst`. From then on SIGHUP reloads the policy
    where that is safe (see `hangup_may_reload`), and so does a change of its file with `watch`.
    Later calls are no-ops. The routes are inside all middleware, so vLLM's authentication protects
    them."""
    state = state_of(app)
    if state.routes:
        return
    state.routes = True
    app.include_router(router)
    app.include_router(probes)
    _show_paused(False)
    adopt_rules(app)
    siblings = state.siblings = _siblings(app)
    if siblings is not None:
        state.tasks["follow"] = asyncio.create_task(follow_reloads(app, siblings))
    file = _watched_file(app)
    if file is not None:
        state.tasks["watch"] = asyncio.create_task(watch_policy(app, file))
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and hangup_may_reload():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(_reload(app)))


def _watched_file(app: FastAPI) -> PolicyFile | None:
    """The policy file to reload when it changes; None if the server was not started with `watch`.
    Never raises: a server without it is better than none."""
    try:
        vllm_config = getattr(app.state, "vllm_config", None)
        settings = parse_settings(getattr(vllm_config, "additional_config", None))
        return PolicyFile(settings.policy) if settings.watch else None
    except Exception:
        logger.exception("Semantic scheduling: the policy file is not watched")
        return None


def _siblings(app: FastAPI) -> Siblings | None:
    """The other API servers of this `vllm serve`. Never raises."""
    try:
        rules = state_of(app).rules
        return rules and join_siblings(app.state.vllm_config, rules.policy.levels)
    except Exception:
        logger.exception("Semantic scheduling: this API server does not know the others")
        return None


async def follow_reloads(app: FastAPI, siblings: Siblings) -> None:
    """Reload this server's rules after another API server has reloaded the policy. Runs until it is
    cancelled."""
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if siblings.has_reload():
            await asyncio.to_thread(adopt_rules, app)


async def _adopt(app: FastAPI) -> None:
    """Load the rules of a policy that the engines have adopted, here and in other API servers."""
    await asyncio.to_thread(adopt_rules, app)
    siblings = state_of(app).siblings
    if siblings is not None:
        siblings.tell_reload()


async def watch_policy(app: FastAPI, file: PolicyFile) -> None:
    """Reload the policy when its file has changed. Runs until it is cancelled."""
    while True:
        if await asyncio.to_thread(file.has_changed):
            await _reload(app)
        await asyncio.sleep(_WATCH_SECONDS)


async def _reload(app: FastAPI) -> None:
    try:
        await reload_engines(app.state.engine_client)  # the engines log the result
    except Exception:
        logger.exception("Semantic scheduling: the policy was not reloaded")
        return
    await _adopt(app)


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """Requests and policy of each engine."""
    return {"engines": await _ask(request, "status")}


@probes.get("/semsched/ready")
async def ready(request: Request) -> dict[str, bool]:
    """200 while vLLM is healthy and not paused, from when all engines had their predictors up or
    needed none; 503 otherwise.

    A predictor that dies later changes nothing: the levels of hints and of the instant reader are
    better than no server, and the alert SemschedPredictorDown tells.
    """
    state = state_of(request.app)
    try:
        await _engine(request).check_health()
        paused = await _engine(request).is_paused()
        if not state.ready:
            reports = await ask_engines(_engine(request), "status")
            state.ready = all(report["ready"] for report in reports)
    except Exception as error:
        raise HTTPException(503, "an engine does not answer") from error
    if paused:
        raise HTTPException(503, "an operator has paused the server")
    if not state.ready:
        raise HTTPException(503, "a predictor is not up yet")
    return {"ready": True}


@router.post("/policy/reload")
async def reload_policy(request: Request) -> dict[str, Any]:
    """Reload the policy file on every engine; 422 if any engine refuses it."""
    try:
        reports = await reload_engines(_engine(request))
    except Exception as error:
        raise HTTPException(501, f"reload: {error}") from error
    reasons = {report["reason"] for report in reports if report["result"] == "refused"}
    if reasons:
        raise HTTPException(422, "\n".join(sorted(reasons)))
    await _adopt(request.app)
    return {"engines": reports}


@router.post("/pause")
async def pause(
    request: Request,
    mode: Annotated[Literal["wait", "keep"], Body(embed=True)] = "wait",
    seconds: Annotated[float, Body(embed=True, gt=0, le=_LONGEST_LEASE)] = _LEASE,
) -> dict[str, Any]:
    """Stop starting requests, and answer once nothing runs any more.

    `wait` lets running requests finish, `keep` freezes them. Queued requests stay queued, new
    requests join them, and all caches are kept. The server resumes by itself after `seconds`,
    unless it is paused again: whoever paused it may be gone.
    """
    _lease(request.app, seconds)
    await _engine(request).pause_generation(mode=mode, clear_cache=False)
    return {"paused": True}


@router.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    """Resume after `pause`."""
    await _engine(request).resume_generation()
    _lease(request.app, None)
    return {"paused": False}


def _lease(app: FastAPI, seconds: float | None) -> None:
    """Let a pause end after so many seconds; None: it has ended, or must not end by itself."""
    state = state_of(app)
    if state.lease is not None:
        state.lease.cancel()
        state.lease = None
    if seconds is not None:
        loop = asyncio.get_running_loop()
        state.lease = loop.call_later(seconds, lambda: loop.create_task(_end_lease(app)))
    _show_paused(seconds is not None)


async def _end_lease(app: FastAPI) -> None:
    logger.warning("Semantic scheduling: nobody has ended the pause in time; the server resumes")
    try:
        await app.state.engine_client.resume_generation()
        _show_paused(False)
    except Exception:
        logger.exception("Semantic scheduling: the server is still paused")


def _show_paused(paused: bool) -> None:
    try:
        SemanticStatLogger.set_in_api_server("paused", float(paused))
    except Exception:
        logger.exception("Semantic scheduling: the pause is not shown on /metrics")


@router.post("/sleep")
async def sleep(
    request: Request, level: Annotated[Literal[1, 2], Body(embed=True)] = 1
) -> dict[str, Any]:
    """Release the accelerator's memory (vLLM's sleep mode); call `pause` first. Frozen requests and
    host copies of KV are recomputed after waking."""
    await _engine(request).sleep(level=level, mode="keep")
    _lease(request.app, None)  # it sleeps until it is woken
    _show_paused(True)
    return {"asleep": level}


@router.post("/wake")
async def wake(request: Request) -> dict[str, Any]:
    """Wake up and resume."""
    awake = await _engine(request).wake_up()
    _lease(request.app, None)
    return {"awake": awake}


@router.post("/weights/reload")
async def reload_weights(request: Request) -> dict[str, Any]:
    """Reload the served model's weights from their source; call `pause` first.

    Everything computed with the old weights is dropped first: prefix cache, host copies, KV of
    frozen requests. If that fails, the old weights stay.
    """
    await drop_caches(request)
    _lease(request.app, None)  # it must not resume with a part of the new weights
    _show_paused(True)
    try:
        await _engine(request).collective_rpc("reload_weights")
    finally:
        _lease(request.app, _LEASE)
    return {"reloaded": True}


@router.post("/caches/drop")
async def drop_caches(request: Request) -> dict[str, Any]:
    """Drop everything computed with replaced weights or adapters; call `pause` first."""
    if not await _engine(request).is_paused():
        raise HTTPException(409, "pause first: requests are running")
    engine = _engine(request)
    try:
        dropped = await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    except Exception as error:  # vLLM raises while a load from the host is in flight
        logger.warning("Semantic scheduling: caches could not be dropped: %s", error)
        dropped = False
    if not dropped:
        raise HTTPException(
            503,
            "KV is still in use or loading from the host; let running requests finish first",
        )
    await engine.reset_mm_cache()
    await engine.reset_encoder_cache()
    return {"dropped": True}


def _engine(request: Request) -> Any:
    return request.app.state.engine_client


async def _ask(request: Request, command: str) -> list[Any]:
    try:
        return await ask_engines(_engine(request), command)
    except Exception as error:
        raise HTTPException(501, f"{command}: {error}") from error


async def reload_engines(engine_client: Any) -> list[Any]:
    """Reload the policy file on all engines; the outcome on each (see `LivePolicy.adopt`)."""
    await ask_engines(engine_client, "load_policy")
    return await ask_engines(engine_client, "adopt_policy")


async def ask_engines(engine_client: Any, command: str) -> list[Any]:
    """Run a command (see `engine.http.commands`) on all engines; their answers."""
    return list(await call_engines(engine_client, UTILITY, command))
