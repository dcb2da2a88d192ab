"""The study of the order of requests on a load that shows its effects."""

import numpy as np
import pytest
from order import compare, expected_waits, load_of, mean_of, simulated, with_burst

from vllm_semantic_sched.lab.bench.workload import BenchRequest
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.sim.predictor import Predictions

PROMPT = "word " * 150
BUCKETS = LengthBuckets((20, 120), (8.0, 60.0, 240.0))


def draw_load(seed: int):
    """150 requests of all levels and three lengths, and a predictor that is never wrong."""
    rng = np.random.default_rng(seed)
    buckets = rng.integers(0, 3, 150)
    requests = [
        BenchRequest(at, at * 0.1, int(rng.integers(0, 5)), PROMPT, int(BUCKETS.means[bucket]))
        for at, bucket in enumerate(buckets)
    ]
    rows = [
        Prediction(
            tuple(float(level == one.level) for level in range(5)),
            tuple(float(bucket == one) for one in range(3)),
        )
        for one, bucket in zip(requests, buckets, strict=True)
    ]
    return load_of(requests, overload=6.0), Predictions(rows, BUCKETS)


@pytest.fixture(scope="module")
def load():
    return draw_load(1)


def test_short_answers_gain_and_urgent_lose_nothing(load) -> None:
    rows = compare(*load)
    strict, weighted = rows["urgency alone"], rows["factor 4"]
    assert weighted.gain > 1.1 * strict.gain > 1.1
    assert weighted.levels[0] == pytest.approx(strict.levels[0], rel=0.1)
    assert weighted.levels[4] < 0.9 * strict.levels[4]
    assert rows["known: factor 4"].gain > 1.3 * rows["known: urgency alone"].gain
    assert mean_of([strict, weighted]).gain == pytest.approx((strict.gain + weighted.gain) / 2)


def test_peak_admission_saves_preemptions_at_same_throughput() -> None:
    """In the mean over three loads: the last requests of one change its throughput by 3 %."""

    def outcomes(enabled: bool) -> tuple[float, int]:
        policy = {"policy": "throughput", "kv_peak": {"enabled": enabled}}
        runs = [simulated(policy, *draw_load(seed)) for seed in (1, 2, 3)]
        speed = sum(levels["all"]["tokens_per_second"] for levels, _ in runs)
        return speed, sum(shortages for _, shortages in runs)

    (before, shortages), (after, fewer) = outcomes(False), outcomes(True)
    assert shortages > 0 and fewer < 0.6 * shortages
    assert after > 0.97 * before


@pytest.mark.parametrize("hints", [False, True])
def test_waits_in_a_burst_are_expected_as_they_come(load, hints) -> None:
    workload, predictions = load
    errors = expected_waits(with_burst(workload), predictions, hints)
    assert errors.samples > 100
    assert errors.median < 0.3 and 0.7 < errors.ratio < 1.3
