"""The study that compares the simulator with the emulated device, on small loads."""

import argparse
import json
from dataclasses import replace

import pytest
from validation import ALL, Agreement, add_arguments, misses, run

from vllm_semantic_sched.lab.device.agreement import Figures, Latencies

pytestmark = pytest.mark.engine


def figures(ttft: float, e2e: float = 2.0, steps: int = 1000) -> Figures:
    levels = {"0": Latencies(5, ttft, e2e), ALL: Latencies(5, ttft, e2e)}
    return Figures(levels, steps, 10.0, 500)


def test_each_target_that_is_missed_is_named() -> None:
    device = figures(1.0)
    assert misses(Agreement(device, figures(1.09, 2.05, 985))) == []
    assert misses(Agreement(device, figures(0.8))) == ["p99 TTFT 20.0 %"]
    assert len(misses(Agreement(device, figures(1.0, 2.2, 900)))) == 2
    assert misses(Agreement(replace(device, found=100), replace(device, found=97))) == [
        "tokens found 3.0 %"
    ]
    unanswered = Figures({ALL: device.levels[ALL]}, 1000, 10.0, 500)
    assert misses(Agreement(device, unanswered)) == ["p99 TTFT inf %"]


def arguments(tmp_path, words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words += f" --requests 40 --seats 8 --factor 1.75 --output {tmp_path}"
    return parser.parse_args(words.split())


def test_table_has_a_row_for_each_policy(tmp_path, capsys) -> None:
    assert run(arguments(tmp_path, "--policy fcfs priority")) == 0
    assert "no target missed" in capsys.readouterr().out
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["policy"] for row in rows] == ["fcfs", "priority"]
    assert (tmp_path / "table.md").read_text().count("\n| ") == 3


def test_policies_are_predicted_from_an_observing_log(tmp_path) -> None:
    assert run(arguments(tmp_path, "--whatif")) == 0
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["policy"] for row in rows} == {"simulated", "ems", "tiers"}
    recorded = [row for row in rows if row["policy"] == "simulated"]
    assert all(abs(row["predicted"] / row["real"] - 1) < 0.1 for row in recorded)
