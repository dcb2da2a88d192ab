"""Runs the simulated engine with given requests."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.orders import End, Orders
from vllm_semantic_sched.policy.overload.refusal import DROPPED
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile
from vllm_semantic_sched.policy.record.spans import HELD, Span
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.snapshot import EngineSnapshot

PROFILE = load_profile("a100-qwen1.5-4b")


Choose = Callable[[Engine], Sequence[Job] | None]


def hold_by(engine: Engine, choose: Choose, early: bool = False) -> None:
    """Hold the jobs of a fake policy as well.

    Args:
        choose: returns the jobs to hold; None: it gives no order.
        early: it chooses before the decisions of a step, not after them.
    """
    take_snapshot, apply = engine.snapshot, engine._apply
    chosen: list[Job] = []

    def snapshot() -> EngineSnapshot:
        chosen[:] = choose(engine) or () if early else ()
        return take_snapshot()

    def apply_with_holds(orders: Orders) -> None:
        if not early:
            chosen[:] = choose(engine) or ()
        running = [job for job in chosen if job.state is JobState.RUNNING]
        orders.hold = list(dict.fromkeys([*running, *orders.hold]))
        apply(orders)

    engine.snapshot = snapshot  # type: ignore[method-assign]
    engine._apply = apply_with_holds  # type: ignore[method-assign]
    # No step repeats the last one here: the policy knows nothing of what is held.
    engine._repeats = lambda: False  # type: ignore[method-assign]


def observe(engine: Engine, job: Job) -> None:
    """Bring a running job's tokens up to date."""
    progress = EngineSnapshot(engine).progress(job)
    job.computed, job.generated = progress.computed, progress.generated


def end(engine: Engine, job: Job) -> None:
    """End a job as the policy would."""
    if job in engine.running:
        observe(engine, job)
    engine.core.refuse(job, DROPPED)
    engine._end(End(job, DROPPED))


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
