"""Commands that an API server sends to the scheduler, through vLLM's channel to the engine process.

vLLM runs a utility call between two steps, on the scheduling thread, whether the engine is busy,
idle or paused.
"""

from __future__ import annotations

from typing import Any

from vllm_semantic_sched.engine.live_policy import LivePolicy
from vllm_semantic_sched.engine.vllm_api import Scheduler, add_utility

UTILITY = "semsched"
"""Name of the utility call; its argument is the name of a command."""


def install() -> None:
    """Register the commands in this process."""
    add_utility(UTILITY, run)


def run(scheduler: Scheduler, command: str) -> Any:
    """Run a command.

    Returns:
        Plain values, or a future.

    Raises:
        ValueError: unknown command, or the base policy is `fcfs`, which supports `status` only.
    """
    if command == "status":
        return status(scheduler)
    live = _live_policy(scheduler)
    if live is None:
        raise ValueError("the server runs base: fcfs, which is fixed; restart it to change that")
    if command == "load_policy":
        live.start()
        return live.request_load()
    if command == "adopt_policy":
        return live.adopt()
    raise ValueError(f"unknown command {command!r}")


def status(scheduler: Scheduler) -> dict[str, Any]:
    """Requests and policy of the scheduler; `jobs`: all requests that the policy knows."""
    running, waiting = scheduler.get_request_counts()
    live = _live_policy(scheduler)
    return {
        "engine": scheduler.vllm_config.parallel_config.data_parallel_index,
        "paused": scheduler.pause_state.name != "UNPAUSED",
        "running": running,
        "waiting": waiting,
        "jobs": len(getattr(scheduler, "jobs", ())),
        "policy": {"result": "started", "version": 1} if live is None else live.adopt(),
    }


def _live_policy(scheduler: Scheduler) -> LivePolicy | None:
    """None under the base policy `fcfs`, where vLLM's own class runs."""
    live: LivePolicy | None = getattr(scheduler, "live_policy", None)
    return live
