"""Runs the simulated engine with given requests."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile
from vllm_semantic_sched.policy.record.spans import HELD, Span
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel

PROFILE = load_profile("a100-qwen1.5-4b")


Choose = Callable[[Engine], Sequence[Job] | None]


def hold_by(engine: Engine, choose: Choose, before: str | None = None) -> None:
    """Add a part to the engine's steps that holds the jobs of a fake policy.

    Args:
        choose: returns the jobs to hold; None: it does not call `hold`.
        before: name of the part that comes next; None: it is the last.
    """
    step = engine.step
    guarded = step._guarded
    hold = engine.hold
    chosen: list[Job] = []  # by the fake policy in this step
    ordered: list[Job] = []  # by the step itself

    def hold_all(jobs: Collection[Job]) -> None:
        ordered[:] = jobs
        hold([*chosen, *ordered])

    engine.hold = hold_all  # type: ignore[method-assign]

    def with_part(doing: str, part: Any, *args: Any) -> Any:
        name = part.__name__
        if name == "tick":
            chosen.clear(), ordered.clear()
        result = guarded(doing, part, *args) if name != before else None
        if name == before or (before is None and name == "_limit_prefills"):
            jobs = choose(engine)
            if jobs is not None:
                chosen[:] = jobs
                hold([*chosen, *ordered])
        return guarded(doing, part, *args) if name == before else result

    step._guarded = with_part  # type: ignore[method-assign]
    # No step repeats the last one here: what the part decides is no change to the core.
    step.repeats = lambda view: False  # type: ignore[method-assign]


def drive(
    policy: dict[str, Any],
    requests: Sequence[SimRequest],
    before_step: Callable[[Engine, float], None] | None = None,
    until: float = float("inf"),
    choose: Choose | None = None,
    profile: EngineProfile = PROFILE,
    **engine: Any,
) -> list[Run]:
    """Run requests, in order of arrival, whose clients state their levels; until all are done, or
    the clock passes `until`. For `choose` see `hold_by`."""
    now = 0.0
    core = SchedulingCore(
        parse_policy({"predictor": {"enabled": False}} | policy), profile, clock=lambda: now
    )
    simulated = Engine(core, EngineModel(**engine), profile, keep_seats=True)
    if choose is not None:
        hold_by(simulated, choose)
    runs: list[Run] = []
    while now < until:
        while len(runs) < len(requests) and requests[len(runs)].arrival <= now:
            runs.append(_run(core, requests[len(runs)]))
            simulated.submit(runs[-1])
        seconds = simulated.begin_step()
        if seconds is None:
            if len(runs) == len(requests):
                break
            now = requests[len(runs)].arrival
            continue
        if before_step is not None:
            before_step(simulated, now)
        now += seconds
        simulated.end_step()
    return runs


def seats_of(run: Run) -> list[Span]:
    """The times in which a request had a seat."""
    return [span for span in run.spans if span.end_kind != HELD]


def _run(core: SchedulingCore, request: SimRequest) -> Run:
    job = core.arrive(
        core.draft(
            str(request.index),
            request.prompt_tokens,
            4096,
            core.read_hints({"urgency": request.level}, 0),
            awaits_prediction=False,
            tenant=request.tenant,
        ),
        request.arrival,
    )
    return Run(request, job, None)
