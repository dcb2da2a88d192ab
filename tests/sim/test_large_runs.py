"""Large runs: little memory, linear time, metrics of a stream of requests."""

import cProfile
import pstats

import numpy as np
import pytest

from vllm_semantic_sched.lab.bench.overhead import measure_simulator
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.sim.metrics import DepthHistory, Recorder
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.scenario import load_scenarios
from vllm_semantic_sched.sim.simulation import simulate


def _percentiles(e2e: np.ndarray, levels: int) -> dict[str, tuple[float, float]]:
    """Median and 99th percentile by row, of requests that arrive at 0 on alternating levels."""
    recorder = Recorder([Slo()] * levels)
    job = Job("", 0, 0.0, 1, 1, 0, LevelSource.DEFAULT)
    for index, seconds in enumerate(e2e.tolist()):
        run = Run(SimRequest(index, 0.0, index % levels, 1, 1), job, None)
        run.started, run.first_token, run.finish = 0.0, 0.0, seconds
        recorder.add(run)
    rows = recorder.levels().items()
    return {name: (row["e2e_p50"], row["e2e_p99"]) for name, row in rows}


def test_percentiles_are_those_of_all_requests() -> None:
    values = np.random.default_rng(0).lognormal(0, 2, 100_000)  # several blocks
    found = _percentiles(values, levels=2)
    for name, part in (("0", values[::2]), ("1", values[1::2]), ("all", values)):
        assert found[name] == pytest.approx(tuple(np.percentile(part, [50, 99])), rel=1e-12)


def test_recorder_matches_the_requests(scenario) -> None:
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


def test_depth_history_keeps_its_area_when_bins_merge() -> None:
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


def test_work_per_request_is_constant() -> None:
    # Calls, not seconds: their number does not depend on the machine.
    assert _calls_per_request(2_000) < 1.3 * _calls_per_request(250)


def test_memory_is_bounded() -> None:
    small, large = measure_simulator([250, 4_000])
    assert large.steps > 5 * small.steps
    assert large.mebibytes < small.mebibytes + 8
