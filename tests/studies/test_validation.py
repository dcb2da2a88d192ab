"""Comparison of simulator and engine, without an engine."""

from pathlib import Path

import pytest
from paced_engine import Costs
from validation import (
    LOADS,
    SCHEDULERS,
    Comparison,
    Run,
    Validation,
    compare,
    make_scenario,
    prepare_load,
)

from vllm_semantic_sched.lab.profiling.live_engine import Step
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, load_profile
from vllm_semantic_sched.sim.simulation import simulate

TERMS = BatchTerms(step=5e-3, per_sequence=1e-4, per_prefill=1e-3, per_context_token=1e-7)
TRUTH = load_profile("cpu-2core-small").model_copy(
    update={"alpha1": 1e-8, "alpha2": 1e-4, "batch": TERMS}
)
SHAPE = {"seats": 4, "token_budget": 512, "block_size": 32, "kv_blocks": 60}
POLICY = SCHEDULERS["semantic"] | {"predictor": {"enabled": False}}


def _result(folder: Path, stretch: float) -> dict:
    """Report of an engine that takes `stretch` times as long as the simulator says."""
    # The first request arrives late.
    requests = [one | {"arrival": 3.0 + one["arrival"] * 2.0} for one in prepare_load("spiky", 40)]
    result = {
        "name": "spiky",
        "shape": SHAPE,
        "profile": TRUTH.model_dump(mode="json"),
        "seconds_per_arrival": 2e-4,
        "pace": 1.0,
        "requests": requests,
        "preemptions": 3,
    }
    runs = simulate(make_scenario(result, "semantic", POLICY, folder), "semantic").runs
    result["served"] = [
        [
            request["arrival"],
            request["arrival"] + stretch * (run.first_token - run.request.arrival),
            request["arrival"] + stretch * (run.finish - run.request.arrival),
        ]
        for request, run in zip(requests, runs, strict=True)
    ]
    return result


@pytest.mark.parametrize("stretch", [1.0, 1.25])
def test_error_is_the_difference_from_the_engine(tmp_path, stretch) -> None:
    found, run = compare(_result(tmp_path, stretch), "semantic", POLICY, tmp_path)
    assert {one.level for one in found} == {"0", "1", "2", "3", "4", "all"}
    assert all(one.error == pytest.approx(1 / stretch - 1, abs=1e-6) for one in found)
    assert run.preemptions == 3 and run.simulated_preemptions > 0


def test_slower_machine_multiplies_costs_by_its_pace() -> None:
    costs = Costs(TRUTH, 2e-4)
    batches = [Batch(decodes=number, context=100 * number) for number in (1, 4, 8)]
    batches[1].add_prefill(0, 50)
    steps = [Step(batch, 1.7 * TRUTH.step(batch)) for batch in batches]
    pace = costs.pace(steps)
    assert pace == pytest.approx(1.7)
    assert costs.times(pace).pace(steps) == pytest.approx(1.0)
    assert costs.times(pace).arrival == pytest.approx(1.7 * 2e-4)


def _validation(real: tuple[float, float], simulated: tuple[float, float]) -> Validation:
    return Validation(
        [
            Comparison("light", name, "0", "e2e_mean", one, other)
            for name, one, other in zip(("FCFS", "semantic"), real, simulated, strict=True)
        ],
        {("light", name): Run(0, 0, 1.0) for name in ("FCFS", "semantic")},
    )


def test_wrong_order_counts_only_if_the_engine_shows_a_clear_one() -> None:
    assert _validation((2.0, 1.0), (1.9, 1.2)).wrong_orders() == []
    assert len(_validation((2.0, 1.0), (1.0, 1.2)).wrong_orders()) == 1
    assert _validation((1.05, 1.0), (1.0, 1.2)).wrong_orders() == []


@pytest.mark.parametrize("name", LOADS)
def test_loads_arrive_at_their_rate(name: str) -> None:
    requests = prepare_load(name, 400)
    assert len(requests) == 400
    # In units of the time that the engine needs for all of them.
    assert requests[-1]["arrival"] == pytest.approx(1 / LOADS[name]["load"], rel=0.25)
