"""Figures of an emulated device from the file of its steps."""

import json
import math

import pytest

from vllm_semantic_sched.lab.bench.device_use import read_use


def test_steps_that_end_in_the_window_count(tmp_path):
    trace = tmp_path / "steps"

    def step(end, idle, host, sampled=8, prefills=0):
        known = {"end": end, "seconds": 0.03, "idle": idle, "waited": 0.01, "host": host}
        requests = {"decodes": sampled - prefills, "prefills": prefills}
        return json.dumps(known | requests | {"sampled": sampled}) + "\n"

    late = step(99.0, 1.0, 1.0)
    steps = step(2.0, 0.0, 0.001) + step(2.1, 0.02, 0.003, prefills=2) + step(2.2, 5.0, 0.002, 3)
    trace.write_text(step(1.0, 1.0, 9.0) + steps + late)
    use = read_use(trace, 1.5, 3.0)
    assert use.tokens == pytest.approx(19 / 0.12)
    assert use.idle == pytest.approx(0.2)  # not counted: of three requests, more may have to come
    assert use.host_p50 == pytest.approx(0.002) and 0.0029 < use.host_p99 <= 0.003
    trace.write_text(step(2.0, 0.0, 0.001) + late[:20])  # not written to its end
    assert read_use(trace, 0.0, 100.0).tokens == pytest.approx(8 / 0.04)


def test_without_steps_there_are_no_figures(tmp_path):
    assert math.isnan(read_use(tmp_path / "absent", 0.0, 1.0).tokens)
