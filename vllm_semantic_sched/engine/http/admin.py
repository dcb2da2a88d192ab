"""Operator endpoints under /v1/semsched, /semsched/ready for probes, the watch on the policy file.

The operator endpoints reload the server's own policy file and weights, pause, sleep and report.
No request can name a file. They answer requests from the server's own machine only, with the
server's API key if it has one, and with a token that only users who may read the server's own files
have (`access.py`, `operate.token`). `pausing.py` has those that stop the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Request

from vllm_semantic_sched.engine.http import pausing
from vllm_semantic_sched.engine.http.access import from_this_machine
from vllm_semantic_sched.engine.http.commands import READING, UTILITY
from vllm_semantic_sched.engine.http.incoming import state_of
from vllm_semantic_sched.engine.http.pausing import engine_of, show_paused
from vllm_semantic_sched.engine.http.preparation import adopt_rules
from vllm_semantic_sched.engine.http.siblings import Siblings, join_siblings
from vllm_semantic_sched.engine.live_policy import hangup_may_reload
from vllm_semantic_sched.engine.startup.policy_file import PolicyFile
from vllm_semantic_sched.engine.startup.settings import parse_settings
from vllm_semantic_sched.engine.vllm_api import call_engines, engine_count
from vllm_semantic_sched.predict.corrections import (
    Correction,
    append,
    corrections_path,
    read_corrections,
)

logger = logging.getLogger("vllm.semantic_sched")

PREFIX = "/v1/semsched"  # vLLM requires the API key under /v1
_WATCH_SECONDS = 5.0  # between two looks at the policy file
_FOLLOW_SECONDS = 0.5  # between two looks for the reloads of other API servers
_LONGEST_ID = 512  # characters


router = APIRouter(prefix=PREFIX, dependencies=[Depends(from_this_machine)])
router.include_router(pausing.router)
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
    show_paused(False)
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
            await _follow(app)


async def _adopt(app: FastAPI) -> None:
    """Load the rules of a policy that the engines have adopted, here and in other API servers."""
    await _follow(app)
    siblings = state_of(app).siblings
    if siblings is not None:
        siblings.tell_reload()


async def _follow(app: FastAPI) -> None:
    """Do here what the engines do."""
    await asyncio.to_thread(adopt_rules, app)
    try:
        reports = await ask_engines(app.state.engine_client, "canary_status")
        running = [report for report in reports if report.get("running")]
        state_of(app).canaries = sum(report["role"] == "new" for report in running)
    except Exception:
        logger.exception("Semantic scheduling: this API server does not know of a canary")


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
        await engine_of(request).check_health()
        paused = await engine_of(request).is_paused()
        if not state.ready:
            reports = await ask_engines(engine_of(request), "status")
            state.ready = all(report["ready"] for report in reports)
    except Exception as error:
        raise HTTPException(503, "an engine does not answer") from error
    if paused:
        raise HTTPException(503, "an operator has paused the server")
    if not state.ready:
        raise HTTPException(503, "a predictor is not up yet")
    return {"ready": True}


@router.post("/correct")
async def correct(
    request: Request,
    id: Annotated[str, Body(max_length=_LONGEST_ID)],
    level: Annotated[int, Body(ge=0)],
    sampled: Annotated[bool, Body()] = False,
) -> dict[str, Any]:
    """Record the true level of a request that has ended, for `semsched corrections`: probabilities,
    levels and time, neither its id nor its text.

    Args:
        id: of the client's answer, or of the event log.
        sampled: the request was drawn at random for review.
    """
    path = _corrections(request)
    readings = [found for found in await _ask(request, READING + id) if found]
    if not readings:
        raise HTTPException(404, "no such request has ended lately, or it was not read")
    reading = readings[0]
    if level >= len(reading["probabilities"]):
        raise HTTPException(422, f"level: 0 to {len(reading['probabilities']) - 1}")
    made = Correction(round(time.time(), 3), corrected=level, sampled=sampled, **reading)
    await asyncio.to_thread(append, path, made)
    return {"level": made.level, "corrected": level}


@router.get("/corrections")
async def corrections(request: Request) -> dict[str, Any]:
    """All corrections."""
    path = _corrections(request)
    found = await asyncio.to_thread(read_corrections, path) if path.exists() else []
    return {"corrections": [one._asdict() for one in found]}


def _corrections(request: Request) -> Path:
    rules = state_of(request.app).rules
    path = None if rules is None else corrections_path(rules.policy.events)
    if path is None:
        raise HTTPException(409, "corrections need an event log: set events.path in the policy")
    return path


@router.post("/policy/reload")
async def reload_policy(request: Request) -> dict[str, Any]:
    """Reload the policy file on every engine; 422 if any engine refuses it."""
    try:
        reports = await reload_engines(engine_of(request))
    except Exception as error:
        raise HTTPException(501, f"reload: {error}") from error
    reasons = {report["reason"] for report in reports if report["result"] == "refused"}
    if reasons:
        raise HTTPException(422, "\n".join(sorted(reasons)))
    await _adopt(request.app)
    return {"engines": reports}


@router.post("/canary/start")
async def start_canary(
    request: Request,
    policy: Annotated[dict[str, Any], Body()],
    share: Annotated[float, Body(gt=0, lt=1)],
    period: Annotated[float, Body(gt=0)],
    lease: Annotated[float, Body(gt=0)],
    watch: Annotated[list[Literal["ttft", "tpot", "e2e"]], Body()],
) -> dict[str, Any]:
    """Try a policy on a share of the traffic: see `policy.canary`. 422 if an engine refuses it."""
    engines = engine_count(request.app.state.vllm_config)
    plan = {"share": share, "period": period, "lease": lease, "watch": watch}
    canaries = min(engines - 1, max(1, round(share * engines)))
    given = {"policy": policy, "plan": plan, "engines": engines, "canaries": canaries}
    reports = await _ask(request, f"canary_start {json.dumps(given)}")
    refused = [report["refused"] for report in reports if "refused" in report]
    if refused:
        if len(refused) < len(reports):  # others have begun; a canary that ran before goes on
            await stop_canary(request)
        raise HTTPException(422, "\n".join(sorted(set(refused))))
    await _adopt(request.app)
    return {"engines": reports}


@router.get("/canary")
async def canary_status(request: Request) -> dict[str, Any]:
    """The canary of each engine (see `engine.canary.CanaryDriver.report`)."""
    return {"engines": await _ask(request, "canary_status")}


@router.post("/canary/stop")
async def stop_canary(
    request: Request, keep: Annotated[bool, Body(embed=True)] = False
) -> dict[str, Any]:
    """End the canary; with `keep` the new policy stays in force until a reload or restart."""
    reports = await _ask(request, f"canary_stop {json.dumps({'keep': keep})}")
    await _adopt(request.app)
    return {"engines": reports}


async def _ask(request: Request, command: str) -> list[Any]:
    try:
        return await ask_engines(engine_of(request), command)
    except Exception as error:
        raise HTTPException(501, f"{command}: {error}") from error


async def reload_engines(engine_client: Any) -> list[Any]:
    """Reload the policy file on all engines; the outcome on each (see `LivePolicy.adopt`)."""
    await ask_engines(engine_client, "load_policy")
    return await ask_engines(engine_client, "adopt_policy")


async def ask_engines(engine_client: Any, command: str) -> list[Any]:
    """Run a command (see `engine.http.commands`) on all engines; their answers."""
    return list(await call_engines(engine_client, UTILITY, command))
