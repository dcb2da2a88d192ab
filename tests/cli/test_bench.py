"""Options, tables and exit status of `semsched bench`."""

import argparse
import io
import json

import pytest
from fake_results import add_fake_round, fake_comparison, fake_workload
from rich.console import Console

from vllm_semantic_sched.bench.schedulers import NAMES
from vllm_semantic_sched.bench.targets import Target, check_targets
from vllm_semantic_sched.cli import comparison, main

WORKLOAD = fake_workload()


@pytest.fixture
def screen() -> Console:
    return Console(file=io.StringIO(), width=160)


def test_each_level_has_a_table_with_a_row_per_scheduler(screen):
    made = fake_comparison(WORKLOAD, dict(zip(NAMES, (1.0, 0.3, 0.15, 0.1), strict=True)))
    comparison.print_mix(screen, "even", made.mixes["even"])
    comparison.print_targets(screen, check_targets(made.mixes))
    text = screen.file.getvalue()
    assert all(f"urgency {level}" in text for level in range(5))
    assert text.count("Semantic (hint)") == 7  # totals, five levels, all


def test_totals_of_several_rounds_have_a_range(screen):
    made = fake_comparison(WORKLOAD, {})
    for number, pace in enumerate((0.1, 0.3), start=1):
        add_fake_round(made, WORKLOAD, "fcfs", pace, number)
    comparison.print_mix(screen, "even", made.mixes["even"])
    row = made.mixes["even"]["fcfs"]
    fast, slow = (done.tokens_per_second for done in row.rounds)
    assert f"{row.tokens_per_second:.0f} ({slow:.0f}-{fast:.0f})" in screen.file.getvalue()


def test_targets_have_a_verdict(screen):
    comparison.print_targets(screen, [Target("ratio", 2.0, 1.0), Target("ms", 2.0, 1.0, True)])
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    assert ["ratio", "2", "at", "least", "1", "met"] in lines
    assert ["ms", "2", "at", "most", "1", "missed"] in lines


def test_problems_are_printed_and_set_the_exit_status(screen):
    assert comparison.print_problems(screen, []) == 0
    assert comparison.print_problems(screen, ["one thing", "another"]) == 1
    assert screen.file.getvalue() == "one thing\nanother\n"


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError, 2), (FileNotFoundError, 2), (RuntimeError, 1)]
)
def test_errors_set_the_exit_status(error, status, capsys):
    def fail(args: argparse.Namespace) -> int:
        raise error("because")

    assert comparison.run_command("semsched bench", fail, argparse.Namespace()) == status
    assert capsys.readouterr().err == "semsched bench: because\n"


def test_run_refuses_a_model_without_end_token(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    command = ["bench", "run", "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "eos_token_id" in capsys.readouterr().err


def test_simulator_prints_a_row_per_size(capsys):
    assert main(["bench", "simulator", "--requests", "200", "400"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["200", "400"]


@pytest.mark.engine
def test_overhead_measures_every_policy_and_size(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    sizes = ["--waiting", "10,20", "--running", "16", "--steps", "10"]
    assert main(["bench", "overhead", *sizes, "--everything", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["microseconds"]
    names = ("stock", "ems", "fcfs", "everything", "ems, text", "everything, text")
    expected = {(name, size) for name in names for size in (10, 20)}
    assert {(one["scheduler"], one["waiting"]) for one in figures} == expected
    assert all(one["schedule"]["p50"] > 0 for one in figures)
    assert all(one["prepare"]["p50"] > 0 for one in figures if one["scheduler"] == "ems, text")
    printed = capsys.readouterr().out
    assert "whole step" in printed and "preempts for it" in printed
    assert max(map(len, printed.splitlines())) <= 100
