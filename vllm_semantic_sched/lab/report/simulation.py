"""The HTML pages of a simulation and of a capacity plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from vllm_semantic_sched.lab.report.content import (
    Boxes,
    Chart,
    Line,
    Page,
    Table,
    grouped_bars,
    level_title,
    python_and_versions,
    series_colors,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.lab.report.plan import kept, rate, rows
from vllm_semantic_sched.lab.report.table import (
    level_names,
    metric_panels,
    metric_rows,
    metric_values,
    title_of,
)
from vllm_semantic_sched.sim.metrics import ALL, METRICS
from vllm_semantic_sched.sim.plan import ENGINE_QUESTIONS, Answers
from vllm_semantic_sched.sim.runner import Cell
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.spans import level_color

_MOST_CELLS = 6  # with charts over time


def simulation_page(settings: Settings, cells: Sequence[Cell], metric: str) -> Page:
    """The chosen metric, all metrics as a table, and seats and queue depth of the first cells."""
    followed = [cell for cell in cells if cell.depth][:_MOST_CELLS]
    sentence = settings.description or "Simulated schedulers."
    if len(followed) < len(cells):
        sentence += f" Charts over time are of the first {len(followed)} of {len(cells)} cells."
    axis_fields = list(settings.sweep[0]) if settings.sweep else []
    metrics, head, rows = metric_rows(cells, level_title)
    parts: list[Table | Chart] = [
        *_metric_charts(cells, metric, axis_fields),
        Table("All metrics", head, rows, "; ".join(f"{name}: {METRICS[name]}" for name in metrics)),
    ]
    for cell in followed:
        requests = round(cell.levels[ALL]["count"])
        parts.append(gantt_chart(f"Seats: {title_of(cell)}", cell.spans, requests))
        parts.append(_depth_chart(cell))
    return Page(
        "Simulation",
        sentence,
        parts,
        settings.model_dump(mode="json"),
        python_and_versions("numpy"),
    )


def _metric_charts(
    cells: Sequence[Cell], metric: str, axis_fields: Sequence[str]
) -> Iterator[Chart]:
    """A line per level over the first axis of the sweep; without a sweep, a bar per level and
    scheduler."""
    levels = level_names(cells)
    if not axis_fields:
        names = [cell.scheduler for cell in cells]
        series = {
            cell.scheduler: [metric_values([cell], level, metric)[0] for level in levels]
            for cell in cells
        }
        yield grouped_bars(
            f"{metric}: {METRICS[metric]}",
            metric,
            list(map(level_title, levels)),
            series,
            series_colors(names),
        )
        return
    for title, members in metric_panels(cells, axis_fields).items():
        texts = [", ".join(str(cell.point[field]) for field in axis_fields) for cell in members]
        yield Chart(
            f"{metric}: {title}",
            ", ".join(axis_fields),
            metric,
            [
                Line(
                    level_title(level),
                    range(len(members)),
                    metric_values(members, level, metric),
                    "#000000" if level == ALL else level_color(int(level)),
                    dashed=level == ALL,
                )
                for level in levels
            ],
            note=METRICS[metric],
            x_ticks={float(place): text for place, text in enumerate(texts)},
            log_y=True,
        )


def _depth_chart(cell: Cell) -> Chart:
    """Waiting requests over time, stacked by level."""
    times = [time for time, _ in cell.depth]
    half = times[0]  # the first bin starts at 0
    below = [0.0] * len(times)
    marks = []
    for level, depths in enumerate(zip(*(counts for _, counts in cell.depth), strict=True)):
        above = [foot + depth for foot, depth in zip(below, depths, strict=True)]
        name = f"urgency {level}"
        boxes = [
            (time - half, time + half, foot, top, f"{name}: {depth:.3g} waiting at {time:.4g} s")
            for time, foot, top, depth in zip(times, below, above, depths, strict=True)
            if depth
        ]
        marks.append(Boxes(name, boxes, level_color(level)))
        below = above
    title = f"Queue depth: {title_of(cell)}"
    return Chart(title, "seconds", "waiting requests", marks, height=260)


def _trials(answers: Answers) -> Table:
    return Table(
        "Trials",
        ["policy", "question", "requests/s", "engines", "kept promises", "holds"],
        [
            [
                one.scheduler,
                one.question,
                rate(trial),
                trial.engines,
                kept(trial),
                "yes" if trial.holds else "no",
            ]
            for one in answers.values()
            for trial in one.trials
        ],
        note="Kept promises: the lowest share of any level.",
    )


def plan_page(scenario: Scenario, answers: Answers) -> Page:
    """Kept promises over the load, engines for the given load, all trials as a table, and the
    seats of each policy at the given load."""
    schedulers = list(scenario.policies)
    colors = series_colors(schedulers)
    now = answers[schedulers[0], "now"].trials[0]
    table = [[label, *cells] for label, cells in rows(scenario, answers)]
    parts: list[Table | Chart] = [
        Table("Plan", ["", *schedulers], table),
        Chart(
            "Lowest share of kept promises, any level",
            "requests/s",
            "share",
            [_kept_line(answers, scheduler, colors[scheduler]) for scheduler in schedulers],
        ),
        grouped_bars(
            "Engines for the given load",
            "engines",
            [*ENGINE_QUESTIONS.values()],
            {scheduler: _engines(answers, scheduler) for scheduler in schedulers},
            colors,
            log=False,
        ),
    ]
    for scheduler in schedulers:
        answer = answers[scheduler, "now"]
        requests = round(answer.trials[0].levels[ALL]["count"])
        parts.append(gantt_chart(f"Seats at the given load: {scheduler}", answer.spans, requests))
    parts.append(_trials(answers))
    description = scenario.settings.description or "Capacity plan."
    return Page(
        "Capacity plan",
        f"{description} {rate(now):.3g} requests/s on {now.engines} engine(s).",
        parts,
        scenario.settings.model_dump(mode="json"),
        python_and_versions("numpy"),
    )


def _engines(answers: Answers, scheduler: str) -> list[float]:
    best = [answers[scheduler, question].best for question in ENGINE_QUESTIONS]
    return [math.nan if one is None else one.engines for one in best]


def _kept_line(answers: Answers, scheduler: str, color: str) -> Line:
    trials = sorted(answers[scheduler, "load"].trials, key=lambda trial: trial.load)
    return Line(scheduler, list(map(rate, trials)), list(map(kept, trials)), color)
