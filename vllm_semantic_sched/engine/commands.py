"""What an API server can ask the scheduler, through vLLM's own channel to the engine process.

vLLM runs a utility call between two steps, on the scheduling thread, whether the engine is busy,
idle or paused, and answers with what it returns, at once or when a future is done. It looks the
call up among the methods of EngineCore; one is added there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.v1.engine.core import EngineCore

if TYPE_CHECKING:
    from vllm_semantic_sched.engine.scheduler import SemanticScheduler

UTILITY = "semsched"
"""Name of the utility call; its argument is the name of a command."""


def install() -> None:
    """Make the commands reachable in this process."""
    setattr(EngineCore, UTILITY, _call)


def _call(self: EngineCore, command: str) -> Any:
    return run(cast("SemanticScheduler", self.scheduler), command)


def run(scheduler: SemanticScheduler, command: str) -> Any:
    """Carry out a command.

    Returns:
        Plain values, or a future.

    Raises:
        ValueError: no such command, or the base policy is `fcfs`, which has nothing to command.
    """
    if command == "status":
        return status(scheduler)
    live = scheduler._live_policy
    if live is None:
        raise ValueError("the server runs base: fcfs, which is fixed; restart it to change that")
    if command == "load_policy":
        live.start()
        return live.request_load()
    if command == "adopt_policy":
        return live.adopt()
    raise ValueError(f"unknown command {command!r}")


def status(scheduler: SemanticScheduler) -> dict[str, Any]:
    """What the scheduler holds and obeys; `jobs` are all requests that the policy knows of."""
    running, waiting = scheduler.get_request_counts()
    live = scheduler._live_policy
    return {
        "engine": scheduler.vllm_config.parallel_config.data_parallel_index,
        "paused": scheduler.pause_state.name != "UNPAUSED",
        "running": running,
        "waiting": waiting,
        "jobs": 0 if scheduler._core is None else len(scheduler._jobs),
        "policy": {"result": "started", "version": 1} if live is None else live.adopt(),
    }
