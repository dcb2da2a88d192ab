"""Capacity planning: the largest load that meets all SLOs, the fewest engines for a load."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.policy.record.spans import Span
from vllm_semantic_sched.sim.runner import Task, cells_of, run_task
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.sections import Routing

MOST_ENGINES = 64  # that are tried
_LOAD_RANGE = 64.0  # factor on the given load, up and down
_TOLERANCE = 1.03  # ratio of the smallest load that fails to the largest that holds

Question = Literal["now", "load", "engines, least_loaded", "engines, urgency_aware"]
ENGINE_QUESTIONS: dict[Question, Routing] = {
    "engines, least_loaded": "least_loaded",
    "engines, urgency_aware": "urgency_aware",
}
QUESTIONS: tuple[Question, ...] = ("now", "load", *ENGINE_QUESTIONS)


@dataclass(frozen=True, slots=True)
class Trial:
    """The scenario at one load and number of engines."""

    load: float  # factor on the given one
    engines: int
    holds: bool  # whether all SLOs were met, see `holds`
    levels: dict[str, dict[str, float]]  # metrics by level, see `metrics.Recorder`


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scheduler needs or can hold, with all trials that led to it."""

    scheduler: str
    question: Question
    best: Trial | None  # None if no trial holds
    trials: tuple[Trial, ...]  # in the order in which they were made
    spans: tuple[Span, ...] = ()  # in the first repeat of `now`


Answers = Mapping[tuple[str, Question], Answer]  # by scheduler and question


def answer(task: tuple[Scenario, str, Question]) -> Answer:
    """Answer a question about one scheduler of a scenario. `now` tries the given load and engines.
    `load` finds the largest load that the engines hold, within 3 %, by bisection from 1/64 to 64
    times the given load. `engines` finds the fewest engines that hold the given load, at most 64.
    """
    scenario, scheduler, question = task
    engine = scenario.settings.engine
    routing = ENGINE_QUESTIONS.get(question, engine.routing)
    tried: list[tuple[Trial, tuple[Span, ...]]] = []

    def attempt(load: float = 1.0, engines: int = engine.replicas) -> Trial:
        tried.append(_try(scenario, scheduler, load, engines, routing))
        return tried[-1][0]

    if question == "now":
        best: Trial | None = attempt()
    elif question == "load":
        best = largest_load(attempt)
    else:
        best = fewest_engines(lambda engines: attempt(engines=engines))
    trials, spans = zip(*tried, strict=True)
    spans_of_now = spans[0] if question == "now" else ()
    return Answer(
        scheduler=scheduler, question=question, best=best, trials=trials, spans=spans_of_now
    )


def _try(
    scenario: Scenario, scheduler: str, load: float, engines: int, routing: Routing
) -> tuple[Trial, tuple[Span, ...]]:
    """Run all repeats at another load and number of engines; with the spans of the first."""
    settings = scenario.settings
    workload = settings.workload.model_copy(update={"speed": settings.workload.speed * load})
    engine = settings.engine.model_copy(update={"replicas": engines, "routing": routing})
    changed = replace(
        scenario, settings=settings.model_copy(update={"workload": workload, "engine": engine})
    )
    tasks = [Task(changed, scheduler, repeat) for repeat in range(settings.repeats)]
    (cell,) = cells_of(tasks, list(map(run_task, tasks)))
    kept = holds(cell.levels, scenario.slos(scheduler))
    return Trial(load, engines, kept, cell.levels), cell.spans


def holds(levels: dict[str, dict[str, float]], slos: Sequence[Slo]) -> bool:
    """Whether each level met its SLO: all targets met by the SLO's share of requests."""
    return all(
        levels[str(level)]["slo_met"] >= slo.percentile / 100
        for level, slo in enumerate(slos)
        if targets(slo) and str(level) in levels
    )


def largest_load(attempt: Callable[[float], Trial]) -> Trial | None:
    """The trial with the largest load that holds; None if even the smallest load fails."""
    holding = attempt(1.0)
    failing: Trial | None = None
    while not holding.holds:
        if holding.load <= 1 / _LOAD_RANGE:
            return None
        failing = holding
        holding = attempt(holding.load / 2)
    while failing is None:
        if holding.load >= _LOAD_RANGE:
            return holding
        further = attempt(holding.load * 2)
        if further.holds:
            holding = further
        else:
            failing = further
    while failing.load / holding.load > _TOLERANCE:
        middle = attempt(math.sqrt(holding.load * failing.load))
        if middle.holds:
            holding = middle
        else:
            failing = middle
    return holding


def fewest_engines(attempt: Callable[[int], Trial]) -> Trial | None:
    """The trial with the fewest engines that holds; None if `MOST_ENGINES` engines fail."""
    best = attempt(1)
    too_few = 0
    while not best.holds:
        if best.engines >= MOST_ENGINES:
            return None
        too_few = best.engines
        best = attempt(too_few * 2)
    while best.engines - too_few > 1:
        middle = attempt((best.engines + too_few) // 2)
        if middle.holds:
            best = middle
        else:
            too_few = middle.engines
    return best
