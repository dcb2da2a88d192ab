"""The policy `shares` under contention: shares within seconds, and refusals of the right tiers."""

import pytest

from vllm_semantic_sched.sim.scenario import load_scenarios
from vllm_semantic_sched.sim.simulation import simulate


def test_shares_converge_and_premium_is_never_refused() -> None:
    scenario = load_scenarios("shares", {"workload.requests": 1500})[0]
    runs = simulate(scenario, "shares").runs
    end = max(run.request.arrival for run in runs)
    assert end > 45
    tokens = [0, 0, 0]
    for run in runs:
        if run.finish is not None and 10 <= run.finish < end:
            tokens[run.request.level] += run.request.output_tokens
    shares = [count / sum(tokens) for count in tokens]
    assert shares == pytest.approx([0.5, 0.35, 0.15], abs=0.05)
    refused = [run.request.level for run in runs if run.refused == "tier_over_share"]
    assert 0 not in refused and refused.count(2) > refused.count(1) > 0


def test_nobody_is_refused_below_capacity() -> None:
    scenario = load_scenarios("shares", {"workload.requests": 300, "workload.rate": 3.0})[0]
    assert not any(run.refused for run in simulate(scenario, "shares").runs)
