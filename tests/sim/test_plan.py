"""`semsched plan` and several engines: bisection, routing, side-by-side table."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.sim.plan import Trial, fewest_engines, largest_load
from vllm_semantic_sched.sim.routing import Router
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate

from .conftest import SMALL


@given(st.floats(0.02, 60.0))
def test_the_largest_load_is_found_within_three_per_cent(limit: float) -> None:
    found = largest_load(lambda load: Trial(load, 1, {}, holds=load <= limit))
    assert found is not None and found.holds
    assert limit / 1.031 <= found.load <= limit


@given(st.integers(1, 64))
def test_the_fewest_engines_are_found_exactly(needed: int) -> None:
    found = fewest_engines(lambda count: Trial(1.0, count, {}, holds=count >= needed))
    assert found is not None and found.engines == needed


def test_what_never_holds_is_said_to_be_so() -> None:
    assert largest_load(lambda load: Trial(load, 1, {}, holds=False)) is None
    assert fewest_engines(lambda count: Trial(1.0, count, {}, holds=False)) is None


def test_each_routing_goes_where_it_says() -> None:
    turns = Router("round_robin", 2, 3)
    assert [turns.choose(0) for _ in range(4)] == [0, 1, 0, 1]

    least = Router("least_loaded", 2, 3)
    assert [least.choose(2), least.choose(2), least.choose(2)] == [0, 1, 0]
    assert least.choose(0) == 1
    least.leave(1, 2)
    least.leave(1, 0)
    assert least.choose(0) == 1

    urgent = Router("urgency_aware", 2, 3)
    assert [urgent.choose(2) for _ in range(3)] == [0, 1, 0]
    # Nobody urgent is at either: the one with fewer others.
    assert urgent.choose(0) == 1
    # Two lesser requests at engine 0 are in nobody's way; the urgent one at engine 1 is.
    assert urgent.choose(0) == 0


@settings(max_examples=15)
@given(
    replicas=st.integers(1, 4),
    routing=st.sampled_from(["round_robin", "least_loaded", "urgency_aware"]),
)
def test_every_request_finishes_on_the_engine_it_was_sent_to(replicas: int, routing: str) -> None:
    changes = {"engine.replicas": replicas, "engine.routing": routing, "workload.rate": 40.0}
    scenario = parse_scenarios(SMALL, "test", changes)[0]
    runs = simulate(scenario, "semantic").runs
    assert [run.request.index for run in runs] == list(range(60))
    assert {run.engine for run in runs} == set(range(replicas))


def test_more_engines_are_faster(scenario) -> None:
    def last(replicas: int) -> float:
        one = scenario(engine__replicas=replicas, workload__rate=40.0)
        return max(run.finish or 0.0 for run in simulate(one, "semantic").runs)

    assert last(1) > 1.5 * last(2)


def _plan(folder: Path, *options: str) -> int:
    content = SMALL | {
        "schedulers": {"FCFS": {"policy": "fcfs"}, "mine": {"policy": "priority"}},
        "slos": [{"ttft": 0.3, "percentile": 90.0}, {}, {}, {}, {}],
    }
    content["workload"] = content["workload"] | {"hints": True}
    (folder / "plan.yaml").write_text(yaml.safe_dump(content))
    where = ["--scenario", str(folder / "plan.yaml"), "--output", str(folder)]
    return main(["plan", *where, "--quiet", *options])


def test_a_plan_says_load_engines_and_what_another_policy_changes(tmp_path, capsys) -> None:
    assert _plan(tmp_path, "--rate", "40") == 0
    out = capsys.readouterr().out
    assert "largest load" in out and "engines for the given load, urgency_aware" in out
    first = [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")]
    assert (tmp_path / "plan.png").stat().st_size > 5000
    header, load, engines, *_ = first[0].decode().splitlines()
    assert header == ",FCFS,mine"
    _, fcfs, mine = load.split(",")[-3:]
    # The promise is to the most urgent alone: they get further where they go first.
    assert float(mine) > 2 * float(fcfs)
    assert int(engines.split(",")[-1]) < int(engines.split(",")[-2])

    assert _plan(tmp_path, "--rate", "40", "--workers", "2") == 0
    assert [(tmp_path / name).read_bytes() for name in ("plan.csv", "plan.json")] == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "slos=[]"], "promises nothing"),
        (["--policy", "emms"], "'ems'"),
        (["--trace", "no.jsonl"], "no.jsonl"),
        (["--set", "sweep=[{seed: [1, 2]}]"], "sweep"),
    ],
)
def test_plans_that_make_no_sense_are_refused(tmp_path, capsys, options, words) -> None:
    assert _plan(tmp_path, *options) == 2
    assert words in capsys.readouterr().err
