"""The shape of the paper's figures and tables, and the report that compares them with the printed
numbers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reproduction
from reproduction import PRINTED, big_table, report, run_scenarios

from vllm_semantic_sched.sim.predictor import mistaken
from vllm_semantic_sched.sim.runner import Task, run_task
from vllm_semantic_sched.sim.scenario import load_scenarios

METRIC = "waiting_per_token"
PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "reproduction.md"


def _levels(name: str, scheduler: str = "semantic", **changes: Any) -> list[dict[str, float]]:
    """Waiting per token by level, per cell of a sweep; means over three repeats."""
    fields = {key.replace("__", "."): value for key, value in changes.items()}
    cells = []
    for one in load_scenarios(name, fields):
        runs = [run_task(Task(one, scheduler, repeat)).levels for repeat in range(3)]
        cells.append({level: np.mean([run[level][METRIC] for run in runs]) for level in runs[0]})
    return cells


def test_table_1_is_met_under_high_load() -> None:
    (cell,) = _levels(
        "paper-table1-script",
        sweep=[{"predictor.latency": [0.01], "workload.max_burst": [16]}],
    )
    for level in "234":
        assert cell[level] == pytest.approx(PRINTED["table_1"][int(level)][5], rel=0.35)
    waits = [cell[str(level)] for level in range(5)]
    assert waits == sorted(waits)


def test_worse_urgency_predictor_slows_level_0_as_printed() -> None:
    low, high = _levels("paper-fig2a", sweep=[{"predictor.urgency_error": [0.1, 0.9]}])
    assert 2.5 <= high["0"] / low["0"] <= 4.9
    assert high["0"] == pytest.approx(PRINTED["figure_2a"]["0"][1], rel=0.35)


def test_worse_length_predictor_does_not_slow_level_0() -> None:
    low, high = _levels("paper-fig2b", sweep=[{"predictor.length_error": [0.1, 0.9]}])
    assert high["0"] == pytest.approx(low["0"], rel=0.25)
    assert high["3"] > low["3"] and high["4"] > low["4"]


def test_semantic_beats_hpjf_sjf_and_fcfs_in_a_spike() -> None:
    spike = {"sweep": [{"workload.max_burst": [20]}], "workload__bursts": 30}
    waits = [
        _levels("paper-fig2c", scheduler, **spike)[0]["0"]
        for scheduler in ("semantic", "HPJF", "SJF", "FCFS")
    ]
    assert waits == sorted(waits)
    assert waits[3] > 3 * waits[0]


def test_clipping_halves_the_mistakes_at_the_ends() -> None:
    ends = np.zeros(4000, dtype=int)
    said = mistaken(ends, 5, 0.8, np.random.default_rng(2), clipped=True)
    assert np.mean(said != ends) == pytest.approx(0.4, abs=0.03)
    assert said.min() == 0


def test_report_has_every_figure_and_table(monkeypatch) -> None:
    def small(name: str, changes: dict[str, Any] | None = None) -> Any:
        less: dict[str, Any] = {"repeats": 1, "workload.requests": 12}
        return load_scenarios(name, less | (changes or {}))

    monkeypatch.setattr(reproduction, "load_scenarios", small)
    text = "\n".join(report(run_scenarios(workers=1)))
    for name in ("table1", "table1-script", "table2", "table2-script"):
        assert f"`paper-{name}`" in text
    for figure in ("2a", "2b", "2c", "2d", "3", "4", "5"):
        assert f"`paper-fig{figure}`" in text
    assert "| + SLO |" in text and "/ 4.57 |" in text and "nan" not in text


def rows_of(lines: Iterable[str]) -> set[str]:
    """The rows of Markdown tables."""
    return {line for line in lines if line.startswith("|")}


@pytest.mark.parametrize("name", ["paper-table1-script", "paper-table2"])
def test_page_has_the_rows_of_a_run(name) -> None:
    """Cheap ones of the scenarios."""
    rows = rows_of(big_table(name, run_scenarios(workers=1, names=[name])[name]))
    assert len(rows) == 8
    assert rows <= rows_of(PAGE.read_text("utf-8").splitlines())


@pytest.mark.study
def test_page_has_all_rows_of_a_run() -> None:
    rows = rows_of(report(run_scenarios(workers=2)))
    assert rows <= rows_of(PAGE.read_text("utf-8").splitlines())
