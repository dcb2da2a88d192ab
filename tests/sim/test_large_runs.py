"""Large runs: bounded memory, time that grows with the requests, statistics of a stream."""

import cProfile
import pstats

import numpy as np
import pytest

from vllm_semantic_sched.bench.simulator import measure
from vllm_semantic_sched.sim.depth import DepthHistory
from vllm_semantic_sched.sim.metrics import Recorder
from vllm_semantic_sched.sim.quantiles import Quantiles
from vllm_semantic_sched.sim.scenario import load_scenarios
from vllm_semantic_sched.sim.simulation import simulate


def test_quantiles_are_exact_at_first_and_within_a_tenth_of_a_per_cent_later() -> None:
    values = np.random.default_rng(0).lognormal(0, 2, 400_000)
    few, many = Quantiles(), Quantiles()
    few.add(values[:5000])
    for block in np.split(values, 100):
        many.add(block)
    wanted = [1, 50, 99, 99.9]
    assert few.percentiles(wanted) == pytest.approx(list(np.percentile(values[:5000], wanted)))
    assert many.percentiles(wanted) == pytest.approx(
        list(np.percentile(values, wanted)), rel=1.5e-3
    )


def test_the_recorder_measures_what_the_requests_say(scenario) -> None:
    one = scenario(slos=[{"ttft": 0.5}, {"e2e": 3.0}, {}, {}, {}], workload__requests=200)
    recorder = Recorder(one.slos("semantic"))
    runs = simulate(one, "semantic").runs
    for run in runs:
        recorder.add(run)
    levels = recorder.levels()
    assert sum(levels[str(level)]["count"] for level in range(5)) == levels["all"]["count"] == 200
    urgent = [run for run in runs if run.request.level == 0]
    second = [run for run in runs if run.request.level == 1]
    e2e = [run.finish - run.request.arrival for run in urgent]
    tokens = [run.request.output_tokens for run in urgent]
    row = levels["0"]
    assert row["e2e_mean"] == pytest.approx(np.mean(e2e))
    assert row["e2e_p99"] == pytest.approx(np.percentile(e2e, 99))
    assert row["normalized_waiting"] == pytest.approx(np.mean(np.divide(e2e, tokens)))
    kept = [run.first_token - run.request.arrival <= 0.5 for run in urgent]
    kept_too = [run.finish - run.request.arrival <= 3.0 for run in second]
    assert row["slo_met"] == pytest.approx(np.mean(kept))
    assert levels["all"]["slo_met"] == pytest.approx(np.mean(kept + kept_too))
    assert "slo_met" not in levels["2"]


def test_queue_depth_keeps_its_area_when_stretches_grow() -> None:
    history = DepthHistory(levels=2, width=0.1)
    area = [0.0, 0.0]
    rng = np.random.default_rng(3)
    now, depths = 0.0, [0, 0]
    for _ in range(2000):
        gap = float(rng.exponential(0.2))
        area = [total + depth * gap for total, depth in zip(area, depths, strict=True)]
        now += gap
        depths = [int(depth) for depth in rng.integers(0, 5, 2)]
        history.record(now, depths)
    points = history.points()
    width = points[1][0] - points[0][0]
    assert 64 <= len(points) <= 256 and points[-1][0] - width / 2 <= now
    for level in (0, 1):
        measured = sum(counts[level] for _, counts in points) * width
        assert measured == pytest.approx(area[level], rel=1e-6)


def _calls_per_request(requests: int) -> float:
    one = load_scenarios("speed", {"workload.requests": requests})[0]
    recorder = Recorder(one.slos("semantic"))
    profiler = cProfile.Profile()
    profiler.runcall(simulate, one, "semantic", finished=recorder.add)
    return pstats.Stats(profiler).total_calls / requests


def test_work_grows_linearly() -> None:
    # Calls, not seconds: they are the same on any machine.
    assert _calls_per_request(8_000) < 1.3 * _calls_per_request(1_000)


def test_memory_is_bounded() -> None:
    small, large = measure([500, 8_000])
    assert large.steps > 5 * small.steps
    assert large.mebibytes < small.mebibytes + 15
