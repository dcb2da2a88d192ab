"""The predictor model: error rate, confusion, batching."""

import numpy as np
import pytest

from vllm_semantic_sched.sim.predictor import make_buckets, mistaken
from vllm_semantic_sched.sim.sections import PredictorModel
from vllm_semantic_sched.sim.simulation import simulate


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.2, 0.4, 0.9])
def test_error_rate_is_the_share_of_mistakes(rate: float) -> None:
    true = np.arange(10_000) % 5
    said = mistaken(true, 5, rate, np.random.default_rng(1))
    assert np.mean(said != true) == pytest.approx(rate, abs=1e-3)
    assert said.min() >= 0 and said.max() <= 4


def test_error_rate_is_the_mean_relative_distance_of_mistakes() -> None:
    # Away from the ends nothing is cut off: 0.3 of 20 classes is 6 classes.
    true = np.full(4000, 10)
    said = mistaken(true, 20, 0.3, np.random.default_rng(1))
    wrong = said[said != true]
    assert np.abs(wrong - 10).mean() == pytest.approx(6)
    assert {int(value) for value in wrong} == {4, 16}


def test_levels_are_drawn_from_the_confusion_matrix(scenario) -> None:
    rows = [[0, 1, 0, 0, 0]] + [[0, 0, 0, 0, 1]] * 4
    runs = simulate(scenario(predictor__confusion=rows), "semantic").runs
    assert {(run.request.level, run.job.level) for run in runs} == {
        (level, 1 if level == 0 else 4) for level in range(5)
    }


def test_perfect_predictor_gives_the_true_level(scenario) -> None:
    runs = simulate(scenario(predictor__latency=0.0, predictor__hold=True), "semantic").runs
    assert all(run.job.level == run.request.level for run in runs)


def test_bucket_means_are_those_of_the_answers() -> None:
    buckets = make_buckets(PredictorModel(buckets=3), [4, 6, 20, 89])
    assert (buckets.edges, buckets.means) == ((30, 60), (10.0, 45.0, 89.0))  # nobody in the second
    assert len(make_buckets(PredictorModel(buckets=5), list(range(1, 500))).means) == 5


def _first_seats(scenario, **batches) -> list[float]:
    held = scenario(
        workload={
            "arrivals": "bursts",
            "bursts": 4,
            "requests": 10,
            "gap": 10.0,
            "max_burst": 20,
        },
        engine={"kind": "paper", "seats": 64},
        predictor={"latency": 1.0, "hold": True, **batches},
    )
    runs = simulate(held, "semantic").runs
    return [run.started for run in runs]


def test_immediate_mode_takes_all_waiting_full_batching_waits(scenario) -> None:
    at_once = _first_seats(scenario, max_batch=4, max_wait=1e6)
    held = _first_seats(scenario, max_batch=4, max_wait=1e6, mode="full_batching")
    timed = _first_seats(scenario, max_batch=64, max_wait=0.5, mode="full_batching")
    # Ten requests in one burst: two full batches, then what is left when all have arrived.
    assert min(at_once) == pytest.approx(1.0, abs=0.05)
    assert max(at_once) == pytest.approx(3.0, abs=0.05)
    assert max(held) >= 3.0
    assert min(timed) >= 1.0


def test_instant_reader_gives_levels_before_the_predictor(scenario) -> None:
    """With a slow predictor, only the instant reader's levels can have an effect."""
    slow = {"predictor__latency": 1e6}

    def wait(**changes) -> float:
        runs = simulate(scenario(**slow, **changes), "semantic").runs
        urgent = [run.started - run.request.arrival for run in runs if run.request.level == 0]
        return sum(urgent) / len(urgent)

    blind = wait()
    perfect, poor = wait(predictor__instant_error=0.0), wait(predictor__instant_error=0.5)
    assert perfect < poor < blind


def test_predictions_are_corrected(scenario) -> None:
    changes = {"predictor__instant_error": 0.9, "predictor__latency": 0.0}
    runs = simulate(scenario(**changes), "semantic").runs
    assert all(run.job.level == run.request.level for run in runs)
