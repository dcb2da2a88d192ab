"""Sessions in the simulator: requests inherit levels by the rule of the server, and those of a
program wait for the answer before them."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.sim.metrics import Recorder
from vllm_semantic_sched.sim.predictor import Predictions
from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate
from vllm_semantic_sched.sim.workload import Workload

CALM = Prediction((0.0, 0.0, 0.0, 0.0, 1.0))

REQUESTS = [
    SimRequest(0, 0.0, 0, 50, 40, tenant="a", session="s", hint=0),
    SimRequest(1, 1.0, 0, 50, 40, tenant="a", session="s"),
    SimRequest(2, 2.0, 4, 50, 40, tenant="b", session="s"),
    SimRequest(3, 3.0, 4, 50, 40, tenant="a"),
    SimRequest(4, 30.0, 4, 50, 40, tenant="a", session="s"),
]


@pytest.mark.parametrize(("memory", "levels"), [(20.0, [0, 0, 4, 4, 4]), (None, [0, 4, 4, 4, 4])])
def test_floor_is_inherited_within_a_session_and_a_time(scenario, memory, levels) -> None:
    workload = Workload(
        arrivals=np.array([request.arrival for request in REQUESTS]),
        levels=np.array([request.level for request in REQUESTS]),
        prompts=np.array([request.prompt_tokens for request in REQUESTS]),
        outputs=np.array([request.output_tokens for request in REQUESTS]),
        recorded=REQUESTS,
    )
    predictions = Predictions([CALM] * len(REQUESTS), LengthBuckets((), (40.0,)))
    settings = scenario(workload__hints=False, overrides__sessions__memory=memory)
    runs = simulate(settings, "semantic", given=(workload, predictions)).runs
    assert [run.job.level for run in runs] == levels


def test_program_takes_from_its_first_arrival_to_its_last_answer_without_pauses() -> None:
    content = {
        "workload": {
            "arrivals": "poisson",
            "requests": 60,
            "rate": 20.0,
            "reuse": {"turns": 4, "spread": 0.5, "pause": 1.0, "closed": True},
        },
        "engine": {"seats": 4, "prefix_caching": True},
        "schedulers": {"one": {"policy": "sjf"}},
    }
    scenario = parse_scenarios(content)[0]
    runs = simulate(scenario, "one").runs
    recorder = Recorder(scenario.slos("one"))
    programs = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.finish):
        recorder.add(run)
        programs[run.request.session].append(run)
    seconds = []
    for turns in programs.values():
        pauses = [after.request.arrival - before.finish for before, after in pairwise(turns)]
        assert all(pause > 0 for pause in pauses)
        total = turns[-1].finish - turns[0].request.arrival
        seconds.append(total - sum(pauses))
    assert len(programs) == 15 and len({len(turns) for turns in programs.values()}) > 1
    assert recorder.levels()["all"]["program_mean"] == pytest.approx(np.mean(seconds))
    assert recorder.levels()["all"]["program_p99"] == pytest.approx(np.percentile(seconds, 99))


@pytest.mark.parametrize(("by", "arrival", "last"), [("first", 0.2, 3), ("least", 3.0, 1)])
def test_baseline_orders_by_session(by, arrival, last) -> None:
    """On one seat, the second turn of the first program, which arrives after about a second, and
    the only turn of the last program wait for a long answer. By arrival the other one would go
    first."""
    workload = Workload(
        arrivals=np.array([0.0, 0.0, 0.1, arrival]),
        levels=np.zeros(4, dtype=int),
        prompts=np.full(4, 50),
        outputs=np.array([40, 40, 400, 40]),
        sessions=np.array([0, 0, 1, 2]),
        pauses=np.array([0.0, 0.1, 0.0, 0.0]),
    )
    content = {
        "workload": {"requests": 1},
        "engine": {"seats": 1},
        "schedulers": {"one": {"predictor": {"enabled": False}, "preemption": {"enabled": False}}},
        "baselines": {"sessions": {"one": by}},
    }
    nothing = Predictions([None] * 4, LengthBuckets((), (40.0,)))
    runs = simulate(parse_scenarios(content)[0], "one", given=(workload, nothing)).runs
    assert max(runs, key=lambda run: run.finish).request.index == last
