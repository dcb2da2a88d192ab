"""Operator endpoints under /v1/semsched, /semsched/ready for probes, the watch on the policy file.

No request can name a file. The operator endpoints answer the server's own machine only, with the
server's API key if it has one, and a token that only users who may read the server's files have.
"""

import asyncio
import ipaddress
import json
import secrets
import signal
import time
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Request

from vllm_semantic_sched.engine.guard import logged, logger
from vllm_semantic_sched.engine.http import pausing
from vllm_semantic_sched.engine.http.commands import UTILITY
from vllm_semantic_sched.engine.http.idle_metrics import publish, publish_regularly
from vllm_semantic_sched.engine.http.pausing import Reply, engine_of, show_paused
from vllm_semantic_sched.engine.http.peer_servers import PeerServers, join_peers
from vllm_semantic_sched.engine.http.preparation import adopt_rules
from vllm_semantic_sched.engine.http.request_context import state_of
from vllm_semantic_sched.engine.live_policy import hangup_may_reload
from vllm_semantic_sched.engine.startup.settings import PolicyFile, parse_settings
from vllm_semantic_sched.engine.vllm_api import call_engines, engine_count, other_scheduler
from vllm_semantic_sched.policy.config.private_files import TOKEN_HEADER, admin_token
from vllm_semantic_sched.predict.corrections import (
    Correction,
    append,
    corrections_path,
    read_corrections,
)

PREFIX = "/v1/semsched"  # vLLM requires the API key under /v1
LONGEST_ID = 512  # characters of a request id
_LONGEST_NAME = 128  # characters of an operator's name
_LONGEST_REASON = 512
_WATCH_SECONDS = 1.0  # between two looks at the policy file
_FOLLOW_SECONDS = 0.5  # between two looks for the reloads of other API servers


def from_this_machine(request: Request) -> None:
    """Reject requests from elsewhere, without the token, or relayed by a proxy or web page."""
    relayed = {"forwarded", "x-forwarded-for", "x-real-ip", "origin"} & set(request.headers)
    peer = "" if request.client is None else request.client.host  # empty: a Unix socket
    address = _address(peer)
    local = not peer if address is None else address.is_loopback
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
    return name in ("localhost", "") or _address(name) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


router = APIRouter(prefix=PREFIX, dependencies=[Depends(from_this_machine)])
router.include_router(pausing.router)
probes = APIRouter()  # answered to any machine, without the API key


def add_routes(app: FastAPI) -> None:
    """Add the endpoints and load the rules of `UrgentFirst`; later calls are no-ops. SIGHUP then
    reloads the policy where that is safe, and with `watch` so does a change of its file. The routes
    are inside all middleware, so vLLM's authentication protects them."""
    state = state_of(app)
    if state.routes:
        return
    state.routes = True
    app.include_router(router)
    app.include_router(probes)
    show_paused(False)
    adopt_rules(app)
    other = _other_scheduler(app)
    if other is not None:
        logger.warning("Semantic scheduling is off: %s.", other)
    with logged("this API server does not know the others"):
        if state.rules:
            state.peers = join_peers(app.state.vllm_config, state.rules.policy.levels)
    if state.peers is not None:
        state.tasks["follow"] = asyncio.create_task(follow_reloads(app, state.peers))
    if other is None and getattr(app.state, "engine_client", None) is not None:
        state.tasks["publish"] = asyncio.create_task(publish_regularly(app))
    with logged("the policy file is not watched"):
        vllm_config = getattr(app.state, "vllm_config", None)
        settings = parse_settings(getattr(vllm_config, "additional_config", None))
        if settings.watch:
            file = PolicyFile(settings.policy)
            state.tasks["watch"] = asyncio.create_task(watch_policy(app, file))
    if hangup_may_reload():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(_reload(app)))


async def follow_reloads(app: FastAPI, peers: PeerServers) -> None:
    """Reload this server's rules after another API server has reloaded the policy."""
    while True:
        await asyncio.sleep(_FOLLOW_SECONDS)
        if peers.has_reload():
            await _follow(app)


async def _adopt(app: FastAPI) -> None:
    """Load the rules of a policy that the engines have adopted, here and in other API servers."""
    await _follow(app)
    await publish(app)
    peers = state_of(app).peers
    if peers is not None:
        peers.tell_reload()


async def _follow(app: FastAPI) -> None:
    await asyncio.to_thread(adopt_rules, app)
    with logged("this API server does not know of a canary"):
        reports = await ask_engines(app.state.engine_client, "canary_status")
        running = [report for report in reports if report.get("running")]
        state_of(app).canaries = sum(report["role"] == "new" for report in running)


async def watch_policy(app: FastAPI, file: PolicyFile) -> None:
    """Reload the policy when its file has changed."""
    while True:
        if await asyncio.to_thread(file.has_changed):
            await _reload(app)
        await asyncio.sleep(_WATCH_SECONDS)


async def _reload(app: FastAPI) -> None:
    with logged("the policy was not reloaded"):
        await reload_engines(app.state.engine_client)  # the engines log the result
        await _adopt(app)


@router.get("/status")
async def status(request: Request) -> Reply:
    """Requests and policy of each engine."""
    return {"engines": await _ask(request, "status")}


@probes.get("/semsched/ready")
async def ready(request: Request) -> dict[str, bool]:
    """200 while vLLM is healthy and not paused, from when all engines had their predictors up or
    needed none; 503 otherwise. A predictor that dies later changes nothing: levels of hints and of
    the instant reader are better than no server, and the alert SemschedPredictorDown tells."""
    state, engine = state_of(request.app), engine_of(request)
    if state.stopping:
        raise HTTPException(503, "the server is stopping")
    try:
        await engine.check_health()
        paused = await engine.is_paused()
        if not state.ready:
            state.ready = all(status["ready"] for status in await ask_engines(engine, "status"))
    except Exception as error:
        problem = _other_scheduler(request.app) or "an engine does not answer"
        raise HTTPException(503, problem) from error
    if paused:
        raise HTTPException(503, "an operator has paused the server")
    if not state.ready:
        raise HTTPException(503, "a predictor is not up yet")
    return {"ready": True}


@router.post("/correct")
async def correct(
    request: Request,
    id: Annotated[str, Body(max_length=LONGEST_ID)],
    level: Annotated[int, Body(ge=0)],
    sampled: Annotated[bool, Body()] = False,
) -> Reply:
    """Record the true level of a request that has ended, for `semsched corrections`: probabilities,
    levels and time, neither its id nor its text.

    Args:
        id: of the client's answer, or of the event log.
        sampled: the request was drawn at random for review.
    """
    path = _corrections(request)
    reading = next(filter(None, await _ask(request, f"reading {id}")), None)
    if reading is None:
        raise HTTPException(404, "unknown request id, or no prediction was recorded for it")
    if level >= len(reading["probabilities"]):
        raise HTTPException(422, f"level: 0 to {len(reading['probabilities']) - 1}")
    made = Correction(round(time.time(), 3), corrected=level, sampled=sampled, **reading)
    await asyncio.to_thread(append, path, made)
    return {"level": made.level, "corrected": level}


@router.get("/corrections")
async def corrections(request: Request) -> Reply:
    """All corrections."""
    path = _corrections(request)
    entries = await asyncio.to_thread(read_corrections, path) if path.exists() else []
    return {"corrections": [entry._asdict() for entry in entries]}


def _corrections(request: Request) -> Path:
    rules = state_of(request.app).rules
    path = None if rules is None else corrections_path(rules.policy.events)
    if path is None:
        raise HTTPException(409, "corrections need an event log: set events.path in the policy")
    return path


@router.get("/level")
async def standing(request: Request, id: Annotated[str, Query(max_length=LONGEST_ID)]) -> Reply:
    """State, level, place in the queue and expected wait of a request, by its `id`."""
    return await _level(request, id, None)


@router.post("/level")
async def set_level(
    request: Request,
    id: Annotated[str, Body(max_length=LONGEST_ID)],
    level: Annotated[Any, Body()],
    by: Annotated[str, Body(max_length=_LONGEST_NAME)] = "unknown",
    why: Annotated[str, Body(max_length=_LONGEST_REASON)] = "",
) -> Reply:
    """Set the level of a waiting or running request, and of all its prompts and answers.

    Args:
        id: of the client's answer, its `x-request-id`, or of the event log.
        by: the operator, for the event log.
        why: for the event log.
    """
    return await _level(request, id, level, by=_one_line(by), why=_one_line(why))


async def _level(request: Request, id: str, level: Any, by: str = "", why: str = "") -> Reply:
    given = {"id": id, "level": level, "by": by, "why": why}
    answers = await _ask(request, f"level {json.dumps(given)}")
    for answer in answers:
        if "invalid" in answer:
            raise HTTPException(400, answer["invalid"])
        if "refused" in answer:
            raise HTTPException(409, answer["refused"])
    requests = [standing for answer in answers for standing in answer["requests"]]
    if not requests:
        raise HTTPException(404, f"no request {id!r} waits or runs: it has ended, or never came")
    return {"requests": requests}


def _one_line(text: str) -> str:
    """Text that cannot pass for other lines of the server's log."""
    return " ".join(text.split())


@router.post("/policy/reload")
async def reload_policy(request: Request) -> Reply:
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
) -> Reply:
    """Try a policy on a share of the traffic; 422 if an engine refuses it.

    See `policy.canary`.
    """
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
async def canary_status(request: Request) -> Reply:
    """The canary of each engine: what its requests and the others got so far.

    See `engine.live_policy.CanaryDriver.report`.
    """
    return {"engines": await _ask(request, "canary_status")}


@router.post("/canary/stop")
async def stop_canary(request: Request, keep: Annotated[bool, Body(embed=True)] = False) -> Reply:
    """End the canary; with `keep` the new policy stays in force until a reload or restart."""
    reports = await _ask(request, f"canary_stop {json.dumps({'keep': keep})}")
    await _adopt(request.app)
    return {"engines": reports}


async def _ask(request: Request, command: str) -> list[Any]:
    try:
        return await ask_engines(engine_of(request), command)
    except Exception as error:
        problem = _other_scheduler(request.app) or error
        raise HTTPException(501, f"{command}: {problem}") from error


def _other_scheduler(app: FastAPI) -> str | None:
    """That the engines run another scheduler than this package's, if they do."""
    with logged("the scheduler's class is not known"):
        vllm_config = getattr(app.state, "vllm_config", None)
        other = None if vllm_config is None else other_scheduler(vllm_config)
        return other and f"the engines run the scheduler {other} instead of this package's"
    return None


async def reload_engines(engine_client: Any) -> list[Any]:
    """Reload the policy file on all engines; the outcomes, see `LivePolicy.apply_loaded`."""
    await ask_engines(engine_client, "load_policy")
    return await ask_engines(engine_client, "adopt_policy")


async def ask_engines(engine_client: Any, command: str) -> list[Any]:
    """Run a command (see `engine.http.commands`) on all engines; their answers."""
    return list(await call_engines(engine_client, UTILITY, command))
