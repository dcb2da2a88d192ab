"""Runs all cells of a scenario in any number of processes, with the same result."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from vllm_semantic_sched.policy.record.spans import Span
from vllm_semantic_sched.sim.metrics import DepthHistory, Recorder, mean_levels
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.simulation import Given, simulate

T = TypeVar("T")
R = TypeVar("R")

FOLLOWED = 200
"""The first requests, whose times in seats are kept."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of a scheduler; `repeat` counts from 0."""

    scenario: Scenario
    scheduler: str
    repeat: int
    given: Given | None = None  # see `simulate`


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one scheduler at one point of the sweep: of one run, or over all repeats."""

    levels: dict[str, dict[str, float]]  # metrics, see `metrics.Recorder`
    depth: list[tuple[float, tuple[float, ...]]]  # of the first repeat: `DepthHistory.points`
    spans: tuple[Span, ...]  # of the first requests of the first repeat
    point: dict[str, Any]  # fields and values
    scheduler: str


def tasks_of(scenarios: Sequence[Scenario]) -> list[Task]:
    """All runs, in the order of the results."""
    tasks = []
    for scenario in scenarios:
        for scheduler in scenario.policies:
            for repeat in range(scenario.settings.repeats):
                tasks.append(Task(scenario, scheduler, repeat))
    return tasks


def run_task(task: Task) -> Cell:
    """Simulate one run. Only the first repeat records the queue depth and the spans."""
    scenario = task.scenario
    first = task.repeat == 0
    recorder = Recorder(scenario.slos(task.scheduler))
    depth = DepthHistory(scenario.policies[task.scheduler].levels) if first else None
    spans: dict[int, list[Span]] = {}

    def finished(run: Run) -> None:
        recorder.add(run)
        if first and run.request.index < FOLLOWED:
            spans[run.request.index] = run.spans

    simulate(
        scenario,
        task.scheduler,
        task.repeat,
        keep_seats=first,
        finished=finished,
        depth=depth,
        given=task.given,
    )
    return Cell(
        levels=recorder.levels(),
        depth=depth.points() if depth else [],
        spans=tuple(itertools.chain(*(spans[index] for index in sorted(spans)))),
        point=scenario.point,
        scheduler=task.scheduler,
    )


def mapped(work: Callable[[T], R], tasks: Sequence[T], workers: int) -> Iterator[R]:
    """Yield the results of the tasks in their order, by `workers` processes; all must be picklable.
    After an error no further task starts."""
    if workers == 1 or len(tasks) == 1:
        yield from map(work, tasks)
        return
    # Spawn instead of fork, so that workers start from the same state on every platform.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        yield from pool.map(work, tasks)


def cells_of(tasks: Sequence[Task], runs: Sequence[Cell]) -> list[Cell]:
    """Merge the repeats of each cell."""
    cells = []
    pairs = zip(tasks, runs, strict=True)
    # The repeats of a cell follow each other.
    for _, group in groupby(pairs, lambda pair: (id(pair[0].scenario), pair[0].scheduler)):
        repeats = [cell for _, cell in group]
        levels = mean_levels([cell.levels for cell in repeats])
        cells.append(replace(repeats[0], levels=levels))
    return cells
