"""A capacity plan as the rows of a table, as files and as an HTML page."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from vllm_semantic_sched.lab.report.content import (
    Chart,
    Line,
    Page,
    Table,
    beside,
    grouped_values,
    level_title,
    names_text,
    number_text,
    python_and_versions,
    series_colors,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.lab.report.runs import METRIC_NAMES, write_table
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.sim.metrics import ALL
from vllm_semantic_sched.sim.plan import ENGINE_QUESTIONS, MOST_ENGINES, Answers, Question, Trial
from vllm_semantic_sched.sim.scenario import Scenario

_LEVEL_METRICS = ("slo_met", "ttft_p99", "e2e_mean", "normalized_waiting")
_ALL_METRICS = ("tokens_per_second", "preemptions_per_minute", "normalized_waiting")


def rows(
    scenario: Scenario, answers: Answers, names: Mapping[str, str] = MappingProxyType({})
) -> list[list[str]]:
    """The table: a label and a cell per scheduler. `names`: what metrics are called in labels."""
    schedulers = list(scenario.policies)

    def cells(question: Question) -> list[str]:
        best = [answers[scheduler, question].best for scheduler in schedulers]
        if question == "load":
            return ["none" if trial is None else number_text(rate(trial)) for trial in best]
        none = f"more than {MOST_ENGINES}"
        return [none if trial is None else str(trial.engines) for trial in best]

    lines = [["largest load that meets all SLOs, requests/s", *cells("load")]]
    for question, routing in ENGINE_QUESTIONS.items():
        lines.append([f"engines for the given load, {routing}", *cells(question)])
    trials = [answers[scheduler, "now"].trials[0] for scheduler in schedulers]
    slos = scenario.slos(schedulers[-1])
    levels = map(str, range(len(slos)))
    shown = [*itertools.product(levels, _LEVEL_METRICS), *itertools.product([ALL], _ALL_METRICS)]
    for level, metric in shown:
        values = [trial.levels.get(level, {}).get(metric, math.nan) for trial in trials]
        if level != ALL and all(map(math.isnan, values)):
            continue
        label = f"{level_title(level)}: {names.get(metric, metric)}"
        if metric == "slo_met":
            label += f" ({_slo_text(slos[int(level)])})"
        lines.append([label, *map(number_text, values)])
    return lines


def _slo_text(slo: Slo) -> str:
    texts = [f"{name} {value:g} s" for name, value in targets(slo).items()]
    return f"{slo.percentile:g} %: {', '.join(texts)}" if texts else "no SLO"


def rate(trial: Trial) -> float:
    """Requests per second of a trial."""
    return trial.levels[ALL]["requests_per_second"]


def _kept(trial: Trial) -> float:
    """The lowest share of requests that met their SLO of any level."""
    return min(row["slo_met"] for row in trial.levels.values() if "slo_met" in row)


def write_plan(folder: Path, scenario: Scenario, answers: Answers) -> list[Path]:
    """Write plan.csv (the table) and plan.json (all trials); returns their paths."""
    content = {
        "scenario": scenario.settings.model_dump(mode="json"),
        "answers": [
            {
                "scheduler": answer.scheduler,
                "question": answer.question,
                "best": None if answer.best is None else answer.trials.index(answer.best),
                "trials": list(map(asdict, answer.trials)),
            }
            for answer in answers.values()
        ],
    }
    table = [["", *scenario.policies], *rows(scenario, answers)]
    return write_table(folder, "plan", table, content)


def plan_page(scenario: Scenario, answers: Answers) -> Page:
    """SLO met over the load, engines for the given load, trials, and seats per policy."""
    schedulers = list(scenario.policies)
    colors = series_colors(schedulers)
    now = answers[schedulers[0], "now"].trials[0]
    lines = []
    engines = {}
    for name in schedulers:
        trials = sorted(answers[name, "load"].trials, key=lambda trial: trial.load)
        lines.append(Line(name, [*map(rate, trials)], [*map(_kept, trials)], colors[name]))
        best = [answers[name, question].best for question in ENGINE_QUESTIONS]
        engines[name] = [math.nan if trial is None else trial.engines for trial in best]
    table = rows(scenario, answers, METRIC_NAMES)
    questions = 1 + len(ENGINE_QUESTIONS)
    parts: list[Table | Chart] = [
        *beside(_seats(scenario, answers)),
        Table("Plan", ["", *schedulers], table),
        Chart(
            "Lowest share of requests that met their SLO, any level",
            "requests/s",
            "share",
            lines,
            sentence=f"{_answers_text(table[0], schedulers)}.",
        ),
        grouped_values(
            "Engines for the given load",
            "engines",
            groups=list(ENGINE_QUESTIONS.values()),
            series=engines,
            colors=colors,
            sentence=". ".join(_answers_text(row, schedulers) for row in table[1:questions]) + ".",
        ),
        _trials(answers),
    ]
    description = scenario.settings.description or "Capacity plan."
    sentence = f"{description} {rate(now):.3g} requests/s on {now.engines} engine(s)."
    configuration = scenario.settings.model_dump(mode="json")
    title = f"semsched plan: capacity under {names_text(schedulers)}"
    return Page(title, sentence, parts, configuration, python_and_versions("numpy"))


def _seats(scenario: Scenario, answers: Answers) -> list[Chart]:
    """At the given load; that of FCFS first."""
    policies = scenario.policies
    schedulers = sorted(policies, key=lambda name: policies[name].base != "fcfs")
    first = schedulers[0]
    reference = (first, answers[first, "now"].spans) if policies[first].base == "fcfs" else None
    charts = []
    for name in schedulers:
        answer = answers[name, "now"]
        requests = round(answer.trials[0].levels[ALL]["count"])
        title = f"Seats at the given load: {name}"
        other = None if name == first else reference
        charts.append(gantt_chart(title, answer.spans, requests, other))
    return charts


def _answers_text(row: Sequence[str], schedulers: Sequence[str]) -> str:
    """A row of the plan's table in words."""
    label, *cells = row
    answers = ", ".join(map(" ".join, zip(schedulers, cells, strict=True)))
    return f"{label[0].upper()}{label[1:]}: {answers}"


def _trials(answers: Answers) -> Table:
    columns = ["policy", "question", "requests/s", "engines", "SLO met", "holds"]
    cells: list[list[str | float]] = []
    for answer in answers.values():
        for trial in answer.trials:
            cells.append(
                [
                    answer.scheduler,
                    answer.question,
                    rate(trial),
                    trial.engines,
                    _kept(trial),
                    "yes" if trial.holds else "no",
                ]
            )
    note = "SLO met: the lowest share of any level."
    return Table("Trials", columns, cells, note, folded=True)
