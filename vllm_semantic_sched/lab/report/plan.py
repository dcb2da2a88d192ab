"""A capacity plan as the rows of a table and as files."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from vllm_semantic_sched.lab.report.content import level_title, number_text
from vllm_semantic_sched.lab.report.table import write_table
from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.sim.metrics import ALL, is_promised
from vllm_semantic_sched.sim.plan import ENGINE_QUESTIONS, MOST_ENGINES, Answers, Question, Trial
from vllm_semantic_sched.sim.scenario import Scenario

_LEVEL_METRICS = ("slo_met", "ttft_p99", "e2e_mean", "normalized_waiting")
_ALL_METRICS = ("tokens_per_second", "preemptions_per_minute", "normalized_waiting")


def rows(scenario: Scenario, answers: Answers) -> list[tuple[str, list[str]]]:
    """The table: a label and a cell per scheduler."""
    schedulers = list(scenario.policies)

    def cells(question: Question) -> list[str]:
        best = [answers[scheduler, question].best for scheduler in schedulers]
        if question == "load":
            return ["none" if one is None else number_text(rate(one)) for one in best]
        return [f"more than {MOST_ENGINES}" if one is None else str(one.engines) for one in best]

    lines = [("largest load that keeps all promises, requests/s", cells("load"))]
    for question, routing in ENGINE_QUESTIONS.items():
        lines.append((f"engines for the given load, {routing}", cells(question)))
    trials = [answers[scheduler, "now"].trials[0] for scheduler in schedulers]
    promises = scenario.slos(schedulers[-1])
    for level, metric in (
        *((str(level), metric) for level in range(len(promises)) for metric in _LEVEL_METRICS),
        *((ALL, metric) for metric in _ALL_METRICS),
    ):
        values = [trial.levels.get(level, {}).get(metric, math.nan) for trial in trials]
        if level != ALL and all(map(math.isnan, values)):
            continue
        label = f"{level_title(level)}: {metric}"
        if metric == "slo_met":
            label += f" ({promise_text(promises[int(level)])})"
        lines.append((label, [number_text(value) for value in values]))
    return lines


def promise_text(slo: Slo) -> str:
    """Percentage and targets of an SLO."""
    if not is_promised(slo):
        return "no promise"
    targets = {"ttft": slo.ttft, "tpot": slo.tpot, "e2e": slo.e2e}
    texts = [f"{name} {value:g} s" for name, value in targets.items() if value is not None]
    return f"{slo.percentile:g} %: {', '.join(texts)}"


def write_plan(folder: Path, scenario: Scenario, answers: Answers) -> list[Path]:
    """Write plan.csv (the table) and plan.json (all trials); returns their paths."""
    table = [["", *scenario.policies]]
    table += [[label, *cells] for label, cells in rows(scenario, answers)]
    content = {
        "scenario": scenario.settings.model_dump(mode="json"),
        "answers": [
            {
                "scheduler": one.scheduler,
                "question": one.question,
                "best": None if one.best is None else one.trials.index(one.best),
                "trials": list(map(asdict, one.trials)),
            }
            for one in answers.values()
        ],
    }
    return write_table(folder, "plan", table, content)


def rate(trial: Trial) -> float:
    """Requests per second of a trial."""
    return trial.levels[ALL]["requests_per_second"]


def kept(trial: Trial) -> float:
    """The lowest share of kept promises of any level."""
    return min(row["slo_met"] for row in trial.levels.values() if "slo_met" in row)
