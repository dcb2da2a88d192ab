"""The paper's bursts on a real engine: loads and table; no server."""

import argparse

import pytest
import reproduction_live
from common import write_json
from fake_results import fake_records, fake_workload


def arguments(*more):
    parser = argparse.ArgumentParser()
    reproduction_live.add_arguments(parser)
    return parser.parse_args(["--model", "m", "--output", "o", *more])


def test_cells_are_bursts_of_the_papers_sizes_and_gaps():
    args = arguments("--bursts", "4")
    requests = reproduction_live.requests_of(args, 0.1, 100)
    assert len(requests) == 200 and max(one.output_tokens for one in requests) <= 96
    gaps = {round(one.arrival / 0.1, 6) for one in requests}
    assert all(gap == int(gap) for gap in gaps) and len(gaps) > 1


def test_table_compares_urgency_0_with_semantic():
    workload = fake_workload(20)
    slow = {"FCFS": 0.08, "SJF": 0.06, "HPJF": 0.02, "semantic": 0.01}
    results = {
        name: {
            "0.1/100": reproduction_live.figures_of(
                fake_records(workload, lambda request, seconds=seconds: seconds)
            )
        }
        for name, seconds in slow.items()
    }
    assert results["FCFS"]["0.1/100"]["0"] == pytest.approx(0.08)
    (row,) = reproduction_live.rows_of(results)
    assert row[:5] == ["0.1/100", "2.0", "6.0", "8.0", "10"]
    assert row[5] == "80 / 60 / 20 / 10"


def test_an_interrupted_run_goes_on_only_with_the_same_options(tmp_path):
    args, path = arguments(), tmp_path / "reproduction_live.json"
    assert reproduction_live.results_so_far(path, args) == {}
    write_json(path, {"options": vars(args), "cells": {"FCFS": {}}})
    assert reproduction_live.results_so_far(path, args) == {"FCFS": {}}
    assert reproduction_live.results_so_far(path, arguments("--bursts", "3")) == {}
