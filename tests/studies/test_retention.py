"""The studies of retention and of KV copies, without a server."""

import argparse
import json
from dataclasses import replace

import pytest
import retention
from fake_results import fake_records, fake_row, fake_usage, fake_workload
from kv_copy import Shape, measure

from vllm_semantic_sched.lab.bench.results import MixResult
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.section import PolicyError

WORKLOAD = fake_workload()


@pytest.fixture
def args(tmp_path) -> argparse.Namespace:
    return argparse.Namespace(output=tmp_path, policy="tiers", profile="phone", host_gib=2.0)


def test_each_mode_has_a_policy_file_and_host_memory(args) -> None:
    fcfs, *others = retention.schedulers(args, ["optimal", "swap"])
    assert fcfs.server_args() == ()
    for spec, mode in zip(others, ("optimal", "swap"), strict=True):
        policy = load_policy(spec.policy)
        assert (policy.retention.mode, spec.profile) == (mode, "phone")
        assert policy.tier_names == load_policy("tiers").tier_names
        option, connector = spec.server_args()[-2:]
        assert option == "--kv-transfer-config"
        assert json.loads(connector)["kv_connector_extra_config"] == {"host_gib": 2.0}
    with pytest.raises(PolicyError, match=r"retention\.mode"):
        retention.schedulers(args, ["fastest"])


def row(name: str, pace: float, **counters: float) -> MixResult:
    """A scheduler that takes `pace` seconds per token."""
    records = fake_records(WORKLOAD, pace, prompt_tokens=100)
    usage = fake_usage(counters=counters)
    return fake_row(SchedulerSpec(name, "semantic-true"), WORKLOAD, records, usage=usage)


def rows(**paces: float) -> dict[str, MixResult]:
    names = {mode: mode if mode == "fcfs" else f"semantic-true@{mode}" for mode in paces}
    return {names[mode]: row(names[mode], pace) for mode, pace in paces.items()}


def test_added_latency_counts_levels_1_to_4_by_length() -> None:
    base, slower = row("a", 0.1), row("b", 0.3)
    added = retention.added_latency(base, slower)
    paying = [request for request in WORKLOAD.requests if request.level > 0]
    assert sum(count for _, count in added.values()) == len(paying)
    short = [r for r in paying if r.output_tokens + 100 < 128]
    expected = sum(0.2 * request.output_tokens for request in short) / len(short)
    assert added["0 to 128"] == (pytest.approx(expected), len(short))


def test_targets_compare_optimal_with_every_other_mode() -> None:
    met = {t.text: t.met for t in retention.check(rows(fcfs=0.2, optimal=0.1, swap=0.1))}
    assert len(met) == 4 and all(met.values())
    missed = [t.text for t in retention.check(rows(fcfs=0.1, optimal=0.12, swap=0.1)) if not t.met]
    assert len(missed) == 4
    assert retention.check(rows(fcfs=0.1, swap=0.1)) == []


def test_summary_has_preemptions_and_tokens() -> None:
    found = rows(recompute=0.1, swap=0.2)
    swap = found["semantic-true@swap"]
    swap.rounds[0] = replace(
        swap.rounds[0],
        usage=fake_usage(
            counters={"semsched:preemptions_total": 3.0, "semsched:loaded_tokens_total": 70.0}
        ),
    )
    lines = retention.describe(found)
    assert "3 preemptions" in lines[1] and "70 loaded" in lines[1]
    assert lines[2].startswith("  E2E of levels 1 to 4 against recompute")


def test_copies_have_a_speed() -> None:
    size, speeds = measure(Shape(2, 2, 16, 8, 30, "bfloat16", "cpu"), repeats=2)
    assert size == 2 * 4 * 2 * 8 * 32 * 2  # layers, blocks, heads, tokens, K and V, bytes
    assert set(speeds) == {"plain out", "save", "plain back", "load"}
    assert all(speed > 0 for speed in speeds.values())
