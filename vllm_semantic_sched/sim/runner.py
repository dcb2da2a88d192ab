"""Runs all cells of a scenario, over as many processes as wanted, with the same result."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.sim.metrics import mean_of, measure
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.simulation import simulate

# A Gantt chart of more requests than this cannot be read.
_DRAWABLE = 60


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    scenario: Scenario
    scheduler: str
    repeat: int


@dataclass(frozen=True, slots=True)
class Bar:
    """A request in a seat, for the Gantt chart: seconds; how the time ended."""

    request: int
    level: int
    arrival: float
    start: float
    end: float
    end_kind: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run sends back.

    Attributes:
        levels: metrics by level, see `metrics.measure`.
        bars: when each request had a seat; empty for all but small runs.
    """

    levels: dict[str, dict[str, float]]
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheduler at one point of the sweep, over all repeats.

    Attributes:
        point: swept fields and their values.
        bars: of the first repeat.
    """

    point: dict[str, Any]
    scheduler: str
    levels: dict[str, dict[str, float]]
    bars: tuple[Bar, ...]


def tasks_of(scenarios: Sequence[Scenario]) -> list[Task]:
    """All runs, in the order of the results."""
    return [
        Task(scenario, scheduler, repeat)
        for scenario in scenarios
        for scheduler in scenario.policies
        for repeat in range(scenario.settings.repeats)
    ]


def run_task(task: Task) -> Outcome:
    """Carry out one run."""
    settings = task.scenario.settings
    result = simulate(task.scenario, task.scheduler, task.repeat, keep_spans=task.repeat == 0)
    levels = task.scenario.policies[task.scheduler].levels
    small = task.repeat == 0 and len(result.runs) <= _DRAWABLE
    return Outcome(
        measure(result.runs, levels, settings.ttft_targets),
        tuple(_bars(result.runs)) if small else (),
    )


@contextmanager
def outcomes(tasks: Sequence[Task], workers: int) -> Iterator[Iterator[Outcome]]:
    """The outcomes of the tasks, in their order, whichever is done first."""
    if workers == 1 or len(tasks) == 1:
        yield map(run_task, tasks)
        return
    # Spawned, not forked: a worker starts from the same state on every platform.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        try:
            yield pool.map(run_task, tasks)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def cells_of(tasks: Sequence[Task], results: Sequence[Outcome]) -> list[Cell]:
    """Repeats put together."""
    groups: dict[tuple[int, str], list[Outcome]] = {}
    scenarios: dict[int, Scenario] = {}
    for task, outcome in zip(tasks, results, strict=True):
        scenarios[id(task.scenario)] = task.scenario
        groups.setdefault((id(task.scenario), task.scheduler), []).append(outcome)
    return [
        Cell(
            scenarios[place].point,
            scheduler,
            {
                level: mean_of([one.levels[level] for one in group if level in one.levels])
                for level in dict.fromkeys(level for one in group for level in one.levels)
            },
            group[0].bars,
        )
        for (place, scheduler), group in groups.items()
    ]


def _bars(runs: Sequence[Run]) -> Iterator[Bar]:
    for run in runs:
        for span in run.spans:
            yield Bar(
                run.request.index,
                run.request.level,
                run.request.arrival,
                span.start,
                span.end,
                span.end_kind,
            )
