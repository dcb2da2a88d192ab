"""Scenario files: invalid keys, sweeps, traces, and the shipped scenarios."""

import json
from collections import Counter

import pytest
from small_scenario import SMALL

from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.sim.scenario import load_scenarios, parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate
from vllm_semantic_sched.sim.workload import WorkloadError


@pytest.mark.parametrize("name", shipped_names("scenario"))
def test_every_shipped_scenario_is_valid(name: str) -> None:
    scenarios = load_scenarios(name)
    assert scenarios and scenarios[0].settings.description


def test_scenarios_of_the_paper_are_shipped() -> None:
    wanted = {"paper-table1", "paper-table2", "tiers", "on-device"}
    wanted |= {f"paper-fig2{letter}" for letter in "abcd"}
    assert wanted <= set(shipped_names("scenario"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("workloadd", {}, ["workloadd", "unknown key", "'workload'"]),
        ("workload.arrivals", "burst", ["workload.arrivals", "'bursts'", "burst"]),
        ("workload.prompt.kind", "lognormal", ["median", "sigma"]),
        ("workload.requests", 0, ["workload.requests", "greater than"]),
        ("workload.mix", [1, 2], ["workload.mix", "2 entries", "5 levels"]),
        ("workload.tenants", [1, -1], ["workload.tenants", "weights"]),
        ("engine.profile", "a1000", ["a1000", "profile", "a100-qwen1.5-4b"]),
        ("engine.assumed_profile", "a1000", ["a1000", "profile", "a100-qwen1.5-4b"]),
        ("schedulers.semantic", {"policy": "emms"}, ["emms", "'ems'"]),
        ("schedulers.semantic", {"bse": "sjf"}, ["schedulers.semantic", "bse", "'base'"]),
        ("overrides", {"retention": {"mod": "swap"}}, ["retention.mod", "'mode'"]),
        ("gate", {"schedulers": ["sjf"]}, ["gate.schedulers", "'sjf'", "semantic"]),
        ("sweep", [{"seed": [1, 2], "repeats": [1]}], ["sweep", "seed", "equally many"]),
        ("sweep", [{"engine.sets": [1]}], ["engine.sets", "'seats'"]),
        ("predictor.confusion", [[1.0]] * 5, ["predictor.confusion", "1 entries"]),
    ],
)
def test_invalid_scenarios_are_rejected_with_the_key(field, value, words) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_scenarios(SMALL, "my.yaml", {field: value})
    for word in words:
        assert word in str(refusal.value)


def test_sweep_runs_all_combinations_of_its_axes() -> None:
    sweep = [
        {"seed": [1, 2], "engine.seats": [3, 4]},
        {"overrides.kv_peak.enabled": [True, False]},
    ]
    found = parse_scenarios(SMALL, "my.yaml", {"sweep": sweep})
    assert [(one.settings.seed, one.settings.engine.seats) for one in found] == [
        (1, 3),
        (1, 3),
        (2, 4),
        (2, 4),
    ]
    assert [one.policies["semantic"].kv_peak.enabled for one in found] == [True, False] * 2
    assert found[0].point == {"seed": 1, "engine.seats": 3, "overrides.kv_peak.enabled": True}


def test_trace_is_replayed(tmp_path, scenario) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"arrival": 105.0, "prompt_tokens": 7, "output_tokens": 3},
        {"arrival": 100.0, "prompt_tokens": 5, "output_tokens": 2, "level": 4},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    replay = {"arrivals": "jsonl", "path": str(path), "speed": 2.0}
    runs = simulate(scenario(workload=replay), "semantic").runs
    assert [run.request.arrival for run in runs] == [0.0, 2.5]
    assert [run.request.prompt_tokens for run in runs] == [5, 7]
    assert runs[0].request.level == 4

    path.write_text('{"arrival": 1}')
    with pytest.raises(WorkloadError, match=r"line 1.*prompt_tokens"):
        simulate(scenario(workload=replay), "semantic")


def test_assumed_profile_changes_decisions_but_not_step_times(scenario) -> None:
    def finishes(policy: str, assumed: str | None) -> list[float]:
        changed = scenario(engine__assumed_profile=assumed, schedulers={"mine": {"policy": policy}})
        return [run.finish for run in simulate(changed, "mine").runs]

    # On the slow engine prompts weigh more compared with output tokens.
    assert finishes("fcfs", "cpu-2core-small") == finishes("fcfs", None)
    assert finishes("sjf", "cpu-2core-small") != finishes("sjf", None)


def test_azure_trace_is_read(tmp_path, scenario, monkeypatch) -> None:
    folder = tmp_path / "azure_llm_2023"
    folder.mkdir()
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109"
    )
    monkeypatch.setenv("SEMSCHED_DATA", str(tmp_path))
    runs = simulate(scenario(workload={"arrivals": "azure", "path": "conv"}), "semantic").runs
    assert [run.request.output_tokens for run in runs] == [44, 109]
    assert runs[1].request.arrival == pytest.approx(4.314579)


def test_tenants_are_drawn_by_weight_and_change_no_other() -> None:
    plain, *_ = parse_scenarios(SMALL, "my.yaml", {"workload.requests": 400})
    changes = {"workload.requests": 400, "workload.tenants": [3, 1]}
    shared, *_ = parse_scenarios(SMALL, "my.yaml", changes)
    mine, theirs = (simulate(scenario, "semantic").runs for scenario in (shared, plain))
    assert [run.finish for run in mine] == [run.finish for run in theirs]
    counts = Counter(run.request.tenant for run in mine)
    assert set(counts) == {"tenant 0", "tenant 1"} and 250 < counts["tenant 0"] < 350
    assert {run.request.tenant for run in theirs} == {""}
