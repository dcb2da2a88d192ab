"""Sessions in the simulator: requests inherit levels by the rule of the server."""

import numpy as np
import pytest

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.sim.predictor import Predictions
from vllm_semantic_sched.sim.request import SimRequest
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
