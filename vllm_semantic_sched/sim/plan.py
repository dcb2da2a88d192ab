"""Capacity planning by simulation: how much load holds the promises, how many engines it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.sim.metrics import is_promised, mean_of
from vllm_semantic_sched.sim.routing import Routing
from vllm_semantic_sched.sim.runner import Task, run_task
from vllm_semantic_sched.sim.scenario import Scenario

MOST_ENGINES = 64
"""Nobody is told to buy more than these."""

_LOAD_RANGE = 64.0  # times the given load, up and down
_TOLERANCE = 1.03  # between the largest load that holds and the smallest that does not

Question = Literal["now", "load", "engines, least_loaded", "engines, urgency_aware"]
QUESTIONS: tuple[Question, ...] = (
    "now",
    "load",
    "engines, least_loaded",
    "engines, urgency_aware",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """The scenario at some load and number of engines.

    Attributes:
        load: times the given load.
        levels: metrics by level, see `metrics.Recorder`.
        holds: whether every level with a promise got it, as often as promised.
    """

    load: float
    engines: int
    levels: dict[str, dict[str, float]]
    holds: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question came to.

    Attributes:
        best: the trial that answers it; None if no trial holds.
        trials: all, in the order in which they were made.
    """

    scheduler: str
    question: Question
    best: Trial | None
    trials: tuple[Trial, ...]


def answer(task: tuple[Scenario, str, Question]) -> Answer:
    """Answer a question about one scheduler of a scenario.

    `now`: the given load and engines. `load`: the largest load that the engines hold, within 3 %,
    by bisection between 1/64 and 64 times the given one. `engines`: the fewest engines that hold
    the given load, at most 64.
    """
    scenario, scheduler, question = task
    engine = scenario.settings.engine
    if question == "now":
        trial = try_out(scenario, scheduler, 1.0, engine.replicas, engine.routing)
        return Answer(scheduler, question, trial, (trial,))
    trials: list[Trial] = []
    if question == "load":

        def holds_load(load: float) -> Trial:
            trials.append(try_out(scenario, scheduler, load, engine.replicas, engine.routing))
            return trials[-1]

        best = largest_load(holds_load)
    else:
        routing: Routing = (
            "urgency_aware" if question == "engines, urgency_aware" else "least_loaded"
        )

        def holds_with(engines: int) -> Trial:
            trials.append(try_out(scenario, scheduler, 1.0, engines, routing))
            return trials[-1]

        best = fewest_engines(holds_with)
    return Answer(scheduler, question, best, tuple(trials))


def try_out(
    scenario: Scenario, scheduler: str, load: float, engines: int, routing: Routing
) -> Trial:
    """Run all repeats of a scenario at another load and number of engines."""
    settings = scenario.settings
    workload = settings.workload.model_copy(update={"speed": settings.workload.speed * load})
    engine = settings.engine.model_copy(update={"replicas": engines, "routing": routing})
    changed = replace(
        scenario, settings=settings.model_copy(update={"workload": workload, "engine": engine})
    )
    results = [
        run_task(Task(changed, scheduler, repeat)).levels for repeat in range(settings.repeats)
    ]
    names = dict.fromkeys(name for result in results for name in result)
    levels = {name: mean_of([one[name] for one in results if name in one]) for name in names}
    return Trial(load, engines, levels, holds(levels, scenario.slos(scheduler)))


def holds(levels: dict[str, dict[str, float]], slos: Sequence[Slo]) -> bool:
    """Whether each level that is promised something got it for the promised share of its
    requests. A request counts where all its level's targets were met."""
    return all(
        levels[str(level)]["slo_met"] >= slo.percentile / 100
        for level, slo in enumerate(slos)
        if is_promised(slo) and str(level) in levels
    )


def largest_load(attempt: Callable[[float], Trial]) -> Trial | None:
    """The trial with the largest load that holds; None if not even the smallest does."""
    best, worst = attempt(1.0), None
    if not best.holds:
        worst = best
        while not best.holds:
            if best.load <= 1 / _LOAD_RANGE:
                return None
            worst, best = best, attempt(best.load / 2)
    while worst is None:
        if best.load >= _LOAD_RANGE:
            return best
        further = attempt(best.load * 2)
        best, worst = (further, None) if further.holds else (best, further)
    while worst.load / best.load > _TOLERANCE:
        middle = attempt(math.sqrt(best.load * worst.load))
        best, worst = (middle, worst) if middle.holds else (best, middle)
    return best


def fewest_engines(attempt: Callable[[int], Trial]) -> Trial | None:
    """The trial with the fewest engines that holds; None if 64 do not."""
    best, short = attempt(1), 0
    while not best.holds:
        if best.engines >= MOST_ENGINES:
            return None
        short = best.engines
        best = attempt(short * 2)
    while best.engines - short > 1:
        middle = attempt((best.engines + short) // 2)
        if middle.holds:
            best = middle
        else:
            short = middle.engines
    return best
