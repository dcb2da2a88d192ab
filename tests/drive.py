"""Runs the simulated engine with given requests."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.profile import load_profile
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.replica import make_engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

PROFILE = load_profile("a100-qwen1.5-4b")


def drive(
    policy: dict[str, Any],
    requests: Sequence[SimRequest],
    before_step: Callable[[Engine, float], None] | None = None,
    until: float = float("inf"),
    **engine: Any,
) -> list[Run]:
    """Run requests, in order of arrival, whose clients state their levels; until all are done, or
    the clock passes `until`."""
    now = 0.0
    core = SchedulingCore(
        parse_policy({"predictor": {"enabled": False}} | policy), PROFILE, clock=lambda: now
    )
    simulated = make_engine(core, EngineModel(**engine), PROFILE, keep_seats=True)
    runs: list[Run] = []
    while now < until:
        while len(runs) < len(requests) and requests[len(runs)].arrival <= now:
            runs.append(_run(core, requests[len(runs)]))
            simulated.submit(runs[-1], now)
        seconds = simulated.begin_step(now)
        if seconds is None:
            if len(runs) == len(requests):
                break
            now = requests[len(runs)].arrival
            continue
        if before_step is not None:
            before_step(simulated, now)
        now += seconds
        simulated.end_step(now)
    return runs


def _run(core: SchedulingCore, request: SimRequest) -> Run:
    job = core.new_job(
        str(request.index),
        request.arrival,
        request.prompt_tokens,
        4096,
        core.read_hints({"urgency": request.level}, 0),
        awaits_prediction=False,
        tenant=request.tenant,
    )
    return Run(request, job, None)
