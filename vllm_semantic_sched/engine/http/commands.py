"""Commands that an API server sends to the scheduler as vLLM's utility calls, which run between two
steps, on the scheduling thread, whether the engine is busy, idle or paused."""

import json
from collections import Counter
from typing import Any

from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.live_policy import CanaryDriver, LivePolicy
from vllm_semantic_sched.engine.requests.endings import requests_named
from vllm_semantic_sched.engine.startup.settings import parse_settings
from vllm_semantic_sched.engine.vllm_api import class_name
from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.canary import Plan
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.heap import stored_entries
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.position import position_of

UTILITY = "semsched"  # name of the utility call; its argument is a command


def run(scheduler: Any, command: str) -> Any:
    """Run a command; what follows a space in it is its argument. Returns plain values, or a future.
    Raises ValueError for an unknown one, and under `fcfs`, which can only tell of itself."""
    name, _, argument = command.partition(" ")
    live: LivePolicy | None = getattr(scheduler, "live_policy", None)
    if name == "status":
        return status(scheduler)
    if name == "report":
        return report(scheduler)
    if name == "level":
        return level(scheduler, json.loads(argument))
    if name == "reading":  # of the request with that id
        return None if live is None else scheduler.readings.find(argument)
    if live is None:
        raise ValueError("`base: fcfs` cannot change at runtime; restart the server")
    if name == "load_policy":
        live.start()
        return live.request_load()
    if name == "adopt_policy":
        return live.apply_loaded()
    if name in ("canary_start", "canary_stop", "canary_status"):
        return _canary(scheduler, name, argument)
    raise ValueError(f"unknown command {command!r}")


def status(scheduler: Any) -> dict[str, Any]:
    """Requests and policy of the scheduler.

    `jobs`: all requests that the policy knows; `levels`: their number per level, most urgent first,
    empty under the base policy `fcfs`; `heap_entries`: what all its heaps store; `ready`: whether
    the predictor is up, or not needed; `kv_free`: share of the KV cache, 0 to 1; `scheduler`: its
    class; `kv_connector`: vLLM's name of it, None without one; `host_pool`: KV blocks of the host
    pool that preempted requests can use, 0 without one; `policy`: its name or path, base and
    number of levels, and the latest reload, see `LivePolicy.apply_loaded`.
    """
    running, waiting = scheduler.get_request_counts()
    core: SchedulingCore | None = getattr(scheduler, "core", None)
    jobs = {} if core is None else scheduler.jobs
    by_level = Counter(job.level for job in jobs.values())
    settings = parse_settings(scheduler.vllm_config.additional_config)
    reload = {"result": "started", "version": 1}
    if core is not None:
        reload = scheduler.live_policy.apply_loaded()
    transfer = scheduler.vllm_config.kv_transfer_config
    return {
        "engine": scheduler.vllm_config.parallel_config.data_parallel_index,
        "scheduler": class_name(type(scheduler)),
        "paused": scheduler.pause_state.name != "UNPAUSED",
        "running": running,
        "waiting": waiting,
        "jobs": len(jobs),
        "levels": [] if core is None else [by_level[level] for level in range(core.policy.levels)],
        "heap_entries": stored_entries(),
        "ready": core is None or scheduler.predictions.ready,
        "kv_free": 1.0 - scheduler.kv_cache_manager.usage,
        "kv_connector": None if transfer is None else transfer.kv_connector,
        "host_pool": 0 if core is None else scheduler.preemptions.host_blocks,
        "policy": {
            "name": settings.policy,
            "base": "fcfs" if core is None else core.policy.base,
            "levels": None if core is None else core.policy.levels,
            **reload,
        },
    }


def report(scheduler: Any) -> tuple[int, dict[str, Any] | None]:
    """The engine's number, and what its metrics have to report since the last message (see
    `Counters.take_message`), None for nothing."""
    engine: int = scheduler.vllm_config.parallel_config.data_parallel_index
    if not scheduler.log_stats or getattr(scheduler, "core", None) is None:
        return engine, None
    scheduler.canary.drive()
    return engine, scheduler.report()


def level(scheduler: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Where the requests with an id stand, after they have got a level if one is given.

    `given`: `id`, see `requests_named`; `level`, None to change nothing; `by` and `why`, for the
    event log. Returns `requests`, see `_standing`, those of a change with `level_before`; in place
    of it `invalid` or `refused` with the reason if the level does not exist, or counts for nothing.
    """
    core: SchedulingCore | None = getattr(scheduler, "core", None)
    if core is None:
        return {"refused": "the server runs base: fcfs, which has no levels"}
    names = requests_named(scheduler.jobs, given["id"])
    wanted = given["level"]
    if wanted is None:
        return {"requests": [_standing(scheduler, scheduler.jobs[name]) for name in names]}
    levels = range(core.policy.levels)
    if type(wanted) is not int or wanted not in levels:
        valid = ", ".join(map(str, levels))
        return {"invalid": f"level {wanted!r} does not exist; valid: {valid}"}
    if scheduler.observing:
        return {"refused": "the policy only observes: vLLM orders the requests by itself"}
    if not core.policy.uses_urgency:
        return {"refused": f"base: {core.policy.base} orders the requests without their levels"}
    before = {name: scheduler.jobs[name].level for name in names}
    for name in names:
        _set_level(scheduler, scheduler.jobs[name], wanted, by=given["by"], why=given["why"])
    return {
        "requests": [
            {**_standing(scheduler, scheduler.jobs[name]), "level_before": before[name]}
            for name in names
        ]
    }


def _set_level(scheduler: Any, job: Job, level: int, by: str, why: str) -> None:
    before = job.level
    step.assign(scheduler.core, scheduler.snapshot(), job, level, by=by, why=why)
    change = "kept" if level == before else "raised" if level < before else "lowered"
    scheduler.counters.add("operator_levels", change)
    logger.info(
        "Semantic scheduling: request %s: level %d became %d, by operator %s%s.",
        job.request_id,
        before,
        level,
        by,
        f": {why}" if why else "",
    )


def _standing(scheduler: Any, job: Job) -> dict[str, Any]:
    """`request`, `engine`, `state`, `level`, `level_from`; of one that waits in the order also
    `ahead`, the number of requests before it, and `expected_wait` in seconds, None while the engine
    is paused."""
    standing: dict[str, Any] = {
        "request": job.request_id,
        "engine": scheduler.vllm_config.parallel_config.data_parallel_index,
        "state": job.state.value,
        "level": job.level,
        "level_from": job.level_source.value,
    }
    snapshot = scheduler.snapshot()
    position = position_of(scheduler.core, snapshot, job)
    if position is not None:
        seconds = None if snapshot.paused else position.seconds
        standing["ahead"] = position.ahead
        standing["expected_wait"] = None if seconds is None else round(seconds, 3)
    return standing


def _canary(scheduler: Any, command: str, argument: str) -> dict[str, Any]:
    """See `CanaryDriver`; `refused` says why a canary cannot start."""
    driver: CanaryDriver = scheduler.canary
    given = json.loads(argument or "{}")
    driver.drive()
    if command == "canary_start":
        plan, engines = given["plan"], given["engines"]
        if engines > 1:  # the first of them have the new policy all the time
            index = scheduler.vllm_config.parallel_config.data_parallel_index
            plan["role"] = "new" if index < given["canaries"] else "current"
        try:
            driver.start(given["policy"], Plan(**plan | {"watch": tuple(plan["watch"])}))
        except PolicyError as problem:
            return {"refused": str(problem)}
    elif command == "canary_stop":
        driver.stop("kept" if given["keep"] else "stopped", given["keep"])
    return driver.report()
