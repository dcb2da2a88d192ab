"""A plan as a side-by-side table, as files and as a picture."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.sim.metrics import ALL, is_promised
from vllm_semantic_sched.sim.output import number
from vllm_semantic_sched.sim.plan import MOST_ENGINES, Answer, Question, Trial
from vllm_semantic_sched.sim.scenario import Scenario

_SHOWN = ("slo_met", "ttft_p99", "e2e_mean", "normalized_waiting")


def print_plan(console: Console, scenario: Scenario, answers: Sequence[Answer]) -> None:
    """Print a column per scheduler: what the given load gets, the largest load, the engines."""
    now = _first(answers, "now")
    rate = now.levels[ALL]["requests_per_second"]
    console.print(
        f"{scenario.settings.description} {rate:.3g} requests/s on {now.engines} engine(s)",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for scheduler in scenario.policies:
        table.add_column(scheduler, justify="right")
    for label, cells in rows(scenario, answers):
        table.add_row(label, *cells)
    console.print(table)


def rows(scenario: Scenario, answers: Sequence[Answer]) -> list[tuple[str, list[str]]]:
    """The table: a label and a cell per scheduler."""
    found = {(one.scheduler, one.question): one for one in answers}
    schedulers = list(scenario.policies)
    lines = [
        (
            "largest load that keeps all promises, requests/s",
            [_largest(found[scheduler, "load"]) for scheduler in schedulers],
        )
    ]
    for routing in ("least_loaded", "urgency_aware"):
        question: Question = (
            "engines, least_loaded" if routing == "least_loaded" else "engines, urgency_aware"
        )
        lines.append(
            (
                f"engines for the given load, {routing}",
                [_engines(found[scheduler, question]) for scheduler in schedulers],
            )
        )
    trials = [_trial(found[scheduler, "now"]) for scheduler in schedulers]
    promises = [scenario.slos(scheduler) for scheduler in schedulers]
    for level in range(len(promises[0])):
        for metric in _SHOWN:
            values = [_value(trial, str(level), metric) for trial in trials]
            if not all(math.isnan(value) for value in values):
                label = f"urgency {level}: {metric}"
                if metric == "slo_met":
                    label += f" ({promise_text(promises[-1][level])})"
                lines.append((label, [number(value) for value in values]))
    for metric in ("tokens_per_second", "preemptions_per_minute", "normalized_waiting"):
        lines.append((f"all: {metric}", [number(_value(trial, ALL, metric)) for trial in trials]))
    return lines


def promise_text(slo: Slo) -> str:
    """What is promised, in a few words."""
    targets = [
        f"{name} {value:g} s"
        for name, value in (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e))
        if value is not None
    ]
    return f"{slo.percentile:g} %: {', '.join(targets)}" if is_promised(slo) else "no promise"


def write_plan(folder: Path, scenario: Scenario, answers: Sequence[Answer]) -> list[Path]:
    """Write plan.csv (the table) and plan.json (every trial)."""
    table, document = folder / "plan.csv", folder / "plan.json"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", *scenario.policies])
        writer.writerows([label, *cells] for label, cells in rows(scenario, answers))
    content = {
        "scenario": scenario.settings.model_dump(mode="json"),
        "answers": [
            {
                "scheduler": one.scheduler,
                "question": one.question,
                "best": None if one.best is None else one.trials.index(one.best),
                "trials": [
                    {
                        "load": trial.load,
                        "engines": trial.engines,
                        "holds": trial.holds,
                        "levels": trial.levels,
                    }
                    for trial in one.trials
                ],
            }
            for one in answers
        ],
    }
    document.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return [table, document]


def draw_plan(path: Path, answers: Sequence[Answer]) -> None:
    """The share of kept promises over the load, and the engines that the given load needs."""
    from matplotlib.figure import Figure

    schedulers = list(dict.fromkeys(one.scheduler for one in answers))
    figure = Figure(figsize=(10, 4), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, scheduler in enumerate(schedulers):
        load = next(one for one in answers if one.scheduler == scheduler and one.question == "load")
        trials = sorted(load.trials, key=lambda trial: trial.load)
        points = [(trial.levels[ALL]["requests_per_second"], _kept(trial)) for trial in trials]
        curve.plot(*zip(*points, strict=True), marker="o", ms=3, color=f"C{index}", label=scheduler)
        if load.best is not None:
            rate = load.best.levels[ALL]["requests_per_second"]
            curve.axvline(rate, color=f"C{index}", linestyle=":")
        counts = [
            one.best.engines if one.best is not None else 0
            for one in answers
            if one.scheduler == scheduler and one.question.startswith("engines")
        ]
        places = [index + offset for offset in (-0.2, 0.2)]
        drawn = bars.bar(places, counts, width=0.38, color=f"C{index}")
        drawn.patches[1].set_hatch("//")
        bars.bar_label(drawn, labels=[str(count) if count else "none" for count in counts])
    curve.set_xlabel("requests/s")
    curve.set_ylabel("lowest share of kept promises, any level")
    curve.legend(frameon=False, fontsize=8)
    curve.grid(alpha=0.3)
    bars.set_xticks(range(len(schedulers)), schedulers, fontsize=8)
    bars.set_title("engines for the given load\n(hatched: urgency-aware routing)", fontsize=9)
    bars.yaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def _kept(trial: Trial) -> float:
    return min(row["slo_met"] for row in trial.levels.values() if "slo_met" in row)


def _largest(one: Answer) -> str:
    if one.best is None:
        return "none"
    return number(one.best.levels[ALL]["requests_per_second"])


def _engines(one: Answer) -> str:
    return f"more than {MOST_ENGINES}" if one.best is None else str(one.best.engines)


def _trial(one: Answer) -> Trial:
    assert one.best is not None
    return one.best


def _first(answers: Sequence[Answer], question: Question) -> Trial:
    return _trial(next(one for one in answers if one.question == question))


def _value(trial: Trial, level: str, metric: str) -> float:
    return trial.levels.get(level, {}).get(metric, math.nan)
