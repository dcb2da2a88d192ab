"""Errors of derived profiles: the study's figures, and the errors in the data if it is here."""

import csv
import statistics

import pytest
import roofline as study

from vllm_semantic_sched.policy.profile.devices import device_named
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.profile.roofline import Roofline
from vllm_semantic_sched.sim.data_folder import data_root


def row(tokens: int, milliseconds: float, devices: int = 1) -> dict[str, str]:
    times = {f"time_stats.{name}.median": "0" for name in study._KERNELS}
    times |= {"time_stats.mlp_up_proj.median": str(milliseconds), "time_stats.add.median": "0.5"}
    shape = {"n_embd": 4096, "n_head": 32, "n_kv_head": 32, "n_expanded_embd": 11008}
    rest = {"num_tokens": tokens, "num_tensor_parallel_workers": devices}
    return times | {name: str(value) for name, value in (shape | rest).items()}


def test_time_of_a_layer_is_that_of_its_kernels() -> None:
    assert study.layer_seconds(row(64, 3.0)) == pytest.approx(4e-3)


def test_errors_are_relative_to_the_measured_times() -> None:
    a100 = device_named("a100")
    seconds = [study.derived_seconds(row(tokens, 0.0), a100) for tokens in (1, 4000)]
    # 405 MB of weights at 78 % of 2,039 GB/s; 1.6 TFLOP at 65 % of 312.
    assert seconds[0] == pytest.approx(405e6 / 1.59e12, rel=0.2)
    assert seconds[1] == pytest.approx(1.62e12 / 203e12, rel=0.1)
    rows = [row(1, 2e3 * seconds[0] - 1.0), row(4000, 0.5e3 * seconds[1] - 1.0, devices=1)]
    assert study.errors(rows, a100) == {
        (1, 1): [pytest.approx(-0.5)],
        (1, 4096): [pytest.approx(1.0)],
    }


def test_errors_beside_a_measured_profile() -> None:
    measured = load_profile("cpu-2core-small")
    found = dict(study.cpu_errors(measured.scaled(2.0, 2.0, 3.0), measured))
    assert found.pop("load of 1,000 tokens") == pytest.approx(2.0)
    assert len(found) == 8 and all(error == pytest.approx(1.0) for error in found.values())
    tiny = study.tiny_shape("tiny")
    assert tiny.kv_bytes_per_token == 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head, bytes
    assert Roofline(tiny, device_named("cpu")).profile().model == "tiny"


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_errors_in_kernel_timings(device: str) -> None:
    root = data_root()
    if root is None:
        pytest.skip("no data folder")
    for path in (root / "vidur").glob(f"mlp_{device}_*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            found = study.errors(csv.DictReader(file), device_named(device))
        for errors in found.values():
            assert abs(statistics.median(errors)) < 0.26
            assert max(map(abs, errors)) < 0.45
