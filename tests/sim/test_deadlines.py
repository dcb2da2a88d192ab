"""Deadlines in the simulator: in the workload, in the metrics, and under the baselines."""

import json

import pytest

from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.sim.metrics import Recorder
from vllm_semantic_sched.sim.scenario import load_scenarios, parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate

CHANGES = {"workload.requests": 800}


@pytest.fixture(scope="module")
def levels() -> dict[str, dict[str, dict[str, float]]]:
    scenario = load_scenarios("deadlines", CHANGES)[-1]
    results = {}
    for name in scenario.policies:
        recorder = Recorder(scenario.slos(name))
        simulate(scenario, name, finished=recorder.add)
        results[name] = recorder.levels()
    return results


def test_urgent_deadlines_are_kept_under_overload(levels) -> None:
    for level in ("0", "1"):
        best = max(levels[name][level]["slo_met"] for name in ("SJF", "EDF", "LAS"))
        assert levels["deadlines"][level]["slo_met"] > best


def test_stated_deadlines_keep_more_than_the_same_policy_without(levels) -> None:
    met = {name: rows["all"]["slo_met"] for name, rows in levels.items()}
    assert met["deadlines"] > met["ems"] > met["FCFS"]
    assert levels["deadlines"]["all"]["refused"] > 0
    assert levels["deadlines"]["0"]["refused"] == 0


def test_baselines_order_as_they_say() -> None:
    # One seat; the first request takes it, the others wait.
    rows = [(0.0, 40, 100.0), (0.001, 30, 9.0), (0.002, 10, 50.0), (0.003, 20, 5.0)]
    results = {}
    for baseline in ("edf", "none"):
        order = run_trace(rows, baseline)
        results[baseline] = order
    assert results == {"edf": [0, 3, 1, 2], "none": [0, 2, 3, 1]}


def test_new_request_takes_the_seat_of_one_that_outgrew_its_queue() -> None:
    assert run_trace([(0.0, 600, 100.0), (0.001, 10, 100.0)], "las") == [1, 0]
    assert run_trace([(0.0, 100, 100.0), (0.001, 10, 100.0)], "las") == [0, 1]


@pytest.mark.parametrize(
    ("boost", "order"),
    [
        ({"gamma": 100.0, "lengths": True}, [0, 1, 2, 3]),  # by arrival
        ({"gamma": 0.001, "lengths": True}, [0, 2, 3, 1]),  # shortest first
        ({"gamma": 0.001}, [0, 1, 2, 3]),  # the prompts are equal
    ],
)
def test_boosted_arrival_lies_between_arrival_and_shortest_first(boost, order) -> None:
    rows = [(0.0, 40, 9.0), (0.1, 30, 9.0), (0.2, 10, 9.0), (0.3, 20, 9.0)]
    assert run_trace(rows, "boost", boost) == order


def run_trace(rows, baseline: str, boost=None) -> list[int]:
    """The order in which the requests of a trace finish on one seat."""
    scenario = trace_scenario(rows, baseline, boost)
    runs = simulate(scenario, "one").runs
    return [run.request.index for run in sorted(runs, key=lambda run: run.finish)]


def trace_scenario(rows, baseline: str, boost=None):
    path = trace_path(rows)
    policy = {"base": "sjf", "predictor": {"enabled": False}}
    baselines = {baseline: ["one"]} if baseline != "none" else {}
    if baseline == "las":
        policy = {"base": "priority", "default_level": 0, "predictor": {"enabled": False}}
    if boost is not None:
        policy["base"] = "semantic"
        baselines = {"boost": {"one": boost}}
    data = {
        "workload": {"arrivals": "jsonl", "path": str(path), "limits": True},
        "engine": {"seats": 1, "swap": True},
        "schedulers": {"one": policy},
        "baselines": baselines,
    }
    return parse_scenarios(data)[0]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def trace_path(rows) -> str:
    with open("trace.jsonl", "w", encoding="utf-8") as file:
        for arrival, tokens, deadline in rows:
            row = {"arrival": arrival, "prompt_tokens": 10, "output_tokens": tokens}
            file.write(json.dumps(row | {"deadline": deadline}) + "\n")
    return "trace.jsonl"


def test_deadline_of_a_trace_counts_as_an_slo_of_its_request() -> None:
    scenario = trace_scenario([(0.0, 10, 100.0), (0.001, 10, 0.01)], "none")
    recorder = Recorder(scenario.slos("one"))
    simulate(scenario, "one", finished=recorder.add)
    assert recorder.levels()["all"]["slo_met"] == 0.5


@pytest.mark.parametrize("deadline", [0, -1, float("inf")])
def test_deadline_of_a_trace_must_be_positive(deadline) -> None:
    scenario = trace_scenario([(0.0, 10, deadline)], "none")
    with pytest.raises(ValueError, match="deadline"):
        simulate(scenario, "one")


@pytest.mark.parametrize("deadlines", [[[0, 1]] * 5, [[2, 1]] * 5, [[1, 2]] * 4])
def test_deadlines_by_level_must_be_ranges_one_per_level(deadlines) -> None:
    with pytest.raises(PolicyError, match=r"workload\.deadlines"):
        load_scenarios("deadlines", {"workload.deadlines": deadlines})


def test_baseline_must_be_a_scheduler_with_its_base() -> None:
    with pytest.raises(PolicyError, match=r"baselines\.edf: 'ems' needs base: sjf"):
        load_scenarios("deadlines", {"baselines.edf": ["ems"]})
    with pytest.raises(PolicyError, match=r"baselines\.las: 'other' is not one of"):
        load_scenarios("deadlines", {"baselines.las": ["other"]})
    with pytest.raises(PolicyError, match=r"baselines\.boost: 'ems' needs weighted_levels"):
        load_scenarios("deadlines", {"baselines.boost": {"ems": {"gamma": 0.1}}})
