"""Variants of the predictor's setting, and their table, file and picture; no server."""

import argparse
import io
import json

import prediction_latency
import pytest
from fake_results import fake_records, fake_row, fake_workload
from prediction_latency import Variant, variants
from rich.console import Console

from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.policy.config import load_policy, parse_policy

WORKLOAD = fake_workload(10)


def arguments(*more):
    parser = argparse.ArgumentParser()
    prediction_latency.add_arguments(parser)
    return parser.parse_args(["--model", "m", "--output", "o", *more])


def result(variant, seconds_per_token):
    records = fake_records(WORKLOAD, lambda request: seconds_per_token * (1 + request.level))
    spec = SchedulerSpec(f"semantic@{variant.name}", "semantic")
    return variant, fake_row(spec, WORKLOAD, records)


def test_variants_are_those_of_the_paper():
    latencies = [(v.mode, v.max_batch, v.added_latency) for v in variants(arguments())]
    assert latencies[:4] == [("immediate", 64, s) for s in (0.001, 0.01, 0.1, 1.0)]
    assert [mode for mode, _, _ in latencies[4:]] == ["full_batching"] * 4
    batches = variants(arguments("--vary", "batch"))
    assert [v.max_batch for v in batches] == [4, 16, 32, 64] * 2
    assert {v.added_latency for v in batches} == {0.01}
    # A batch of 64 with 0.01 s is in both tables and runs once per mode.
    assert len(variants(arguments("--vary", "both"))) == len(set(latencies)) + len(batches) - 2


def test_policies_differ_only_in_the_predictor():
    base = load_policy("ems")
    policy = parse_policy(Variant("full_batching", 32, 0.5, 0.1).policy("ems"))
    assert policy.model_copy(update={"predictor": base.predictor}) == base
    changed = (policy.predictor.mode, policy.predictor.max_batch, policy.predictor.max_wait)
    assert changed == ("full_batching", 32, 0.5)
    assert policy.predictor.extra_latency == 0.1 and policy.predictor.instant.enabled
    paper = variants(arguments("--no-instant", "--vary", "both"))
    assert not any(parse_policy(one.policy("ems")).predictor.instant.enabled for one in paper)


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match="extra_latency"):
        Variant("immediate", 64, 0.5, -1.0).policy("ems")
    with pytest.raises(ValueError):
        variants(arguments("--latencies", "fast"))


def test_table_file_and_picture(tmp_path):
    results = [
        result(Variant(mode, batch, 0.5, latency), 0.01 * (1 + latency))
        for mode in ("immediate", "full_batching")
        for batch, latency in ((64, 0.01), (64, 1.0), (4, 0.01))
    ]
    screen = io.StringIO()
    Console(file=screen, width=160).print(prediction_latency.table(results))
    rows = [line.split() for line in screen.getvalue().splitlines() if "immediate" in line]
    assert rows[1][:8] == ["immediate", "64", "1", "20.0", "40.0", "60.0", "80.0", "100.0"]
    document = json.loads(json.dumps(prediction_latency.document(results)))
    first = document["variants"][0]
    assert first["normalized_waiting"]["4"]["mean"] == pytest.approx(0.0505)
    assert (first["mode"], first["max_batch"], first["added_latency"]) == ("immediate", 64, 0.01)
    panels = [(title, label) for title, label, _ in prediction_latency.panels_of(results)]
    assert len(panels) == 4
    prediction_latency.draw(results, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
