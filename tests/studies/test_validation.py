"""Comparison of simulator and engine, without an engine: what is compared and how it is judged."""

from pathlib import Path

import pytest

from vllm_semantic_sched.bench.paced_engine import Costs
from vllm_semantic_sched.bench.validate import (
    LOADS,
    SCHEDULERS,
    Comparison,
    Run,
    Validation,
    _prepare,
    compare,
)
from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.estimates.batch import Batch, BatchTerms
from vllm_semantic_sched.policy.estimates.profile import load_profile
from vllm_semantic_sched.profiling.live_engine import Step
from vllm_semantic_sched.sim.simulation import simulate

TERMS = BatchTerms(step=5e-3, per_sequence=1e-4, per_prefill=1e-3, per_context_token=1e-7)
TRUTH = load_profile("cpu-2core-small").model_copy(
    update={"alpha1": 1e-8, "alpha2": 1e-4, "batch": TERMS}
)
SHAPE = {"seats": 4, "token_budget": 512, "block_size": 32, "kv_blocks": 60}
POLICY = SCHEDULERS["semantic"] | {"predictor": {"enabled": False}}


def _result(folder: Path, stretch: float) -> dict:
    """What an engine would report that takes `stretch` times as long as the simulator says, and
    whose first request comes late."""
    from vllm_semantic_sched.bench.validate import _scenario

    requests = [one | {"arrival": 3.0 + one["arrival"] * 2.0} for one in _prepare("spiky", 40)]
    result = {
        "name": "spiky",
        "shape": SHAPE,
        "profile": TRUTH.model_dump(mode="json"),
        "seconds_per_arrival": 2e-4,
        "pace": 1.0,
        "requests": requests,
        "preemptions": 3,
    }
    runs = simulate(_scenario(result, "semantic", POLICY, folder), "semantic").runs
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
def test_the_error_is_what_the_engine_differs_by(tmp_path, stretch) -> None:
    found, run = compare(_result(tmp_path, stretch), "semantic", POLICY, tmp_path)
    assert {one.level for one in found} == {"0", "1", "2", "3", "4", "all"}
    assert all(one.error == pytest.approx(1 / stretch - 1, abs=1e-6) for one in found)
    assert run.preemptions == 3 and run.simulated_preemptions > 0


def test_a_slower_machine_changes_the_costs_by_its_pace_alone() -> None:
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


def test_a_wrong_order_is_one_that_the_engine_shows_clearly() -> None:
    assert _validation((2.0, 1.0), (1.9, 1.2)).wrong_orders() == []
    assert len(_validation((2.0, 1.0), (1.0, 1.2)).wrong_orders()) == 1
    assert _validation((1.05, 1.0), (1.0, 1.2)).wrong_orders() == []


@pytest.mark.parametrize("name", LOADS)
def test_each_load_comes_as_fast_as_it_says(name: str) -> None:
    requests = _prepare(name, 400)
    assert len(requests) == 400
    # In units of the time that the engine needs for all of them.
    assert requests[-1]["arrival"] == pytest.approx(1 / LOADS[name]["load"], rel=0.25)


def test_validation_without_an_engine_is_refused(tmp_path, capsys) -> None:
    assert main(["simulate", "--validate", "--output", str(tmp_path)]) == 2
    assert "a model and engine options" in capsys.readouterr().err
