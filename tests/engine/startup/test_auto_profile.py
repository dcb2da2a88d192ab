"""The profile `auto` of an engine: devices that are known, measured, or neither."""

import logging

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.startup import auto_profile
from vllm_semantic_sched.engine.startup.device_benchmark import measure_device
from vllm_semantic_sched.engine.vllm_api import Hardware, describe_hardware, describe_model
from vllm_semantic_sched.lab.bench.standalone import build_scheduler
from vllm_semantic_sched.policy.profile.devices import Device, device_named
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline

pytestmark = pytest.mark.engine

MEASURED = Device(name="this processor", bf16=0.1, memory=8, bandwidth=10, host=5, measured=True)


@pytest.fixture
def build(monkeypatch, caplog):
    """Builds schedulers with the profile `auto` on made-up hardware; returns the scheduler and
    what was logged."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(auto_profile, "_measured", {})
    monkeypatch.setattr(auto_profile, "measure_device", lambda **given: MEASURED)

    def make(name: str = "this processor", kind: str = "cpu", memory: float = 8.0, here=True):
        hardware = Hardware(kind, name, "float32", memory, here)
        monkeypatch.setattr(auto_profile, "describe_hardware", lambda config: hardware)
        caplog.clear()
        scheduler = build_scheduler(SemanticScheduler, semantic_sched={"profile": "auto"})
        return scheduler, [record.getMessage() for record in caplog.records]

    return make


def profile_on(scheduler, device: Device):
    parallel, facts = describe_model(scheduler.vllm_config)
    return Roofline(ModelShape.from_config(**facts), device, parallel).profile()


def same_costs(left, right) -> bool:
    return left.model_dump(exclude={"source"}) == right.model_dump(exclude={"source"})


def test_known_device_is_looked_up(build) -> None:
    scheduler, said = build("NVIDIA H100 80GB HBM3", "cuda", 85.0)
    assert same_costs(scheduler.core.profile, profile_on(scheduler, device_named("h100")))
    assert sum("peak figures of h100" in line for line in said) == 1
    # A derived profile is no reason for a warning.
    assert not any("was not measured" in line for line in said)


def test_unknown_device_is_measured_once(build, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        auto_profile, "measure_device", lambda **given: calls.append(given) or MEASURED
    )
    scheduler, said = build()
    assert same_costs(scheduler.core.profile, profile_on(scheduler, MEASURED))
    assert sum("benchmark of this processor" in line for line in said) == 1
    build()
    scheduler._reload()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "kind", "memory", "here", "nearest"),
    [
        # The device belongs to another process, or cannot be measured.
        ("NVIDIA Z9", "cuda", 79.0, False, "a100"),
        ("NVIDIA Z9", "cuda", 38.0, True, "a100-40gb"),
        ("this processor", "cpu", 8.0, True, "cpu"),
    ],
)
def test_unmeasurable_device_is_taken_for_the_nearest(
    build, monkeypatch, name, kind, memory, here, nearest
) -> None:
    def fail(**given):
        raise RuntimeError("no memory")

    monkeypatch.setattr(auto_profile, "measure_device", fail)
    scheduler, said = build(name, kind, memory, here)
    assert same_costs(scheduler.core.profile, profile_on(scheduler, device_named(nearest)))
    assert sum(f"built-in figures for {nearest} (" in line for line in said) == 1


def test_engine_that_cannot_be_described_gets_the_default(build, monkeypatch) -> None:
    def fail(config):
        raise AttributeError("hf_config")

    monkeypatch.setattr(auto_profile, "describe_model", fail)
    scheduler, said = build()
    assert scheduler.core.profile == load_profile("default")
    assert sum("no profile can be derived" in line for line in said) == 1


def test_reload_does_not_measure(build, monkeypatch) -> None:
    scheduler, _ = build("NVIDIA H100", "cuda", 85.0)
    hardware = Hardware("cpu", "this processor", "float32", 8.0, True)
    monkeypatch.setattr(auto_profile, "describe_hardware", lambda config: hardware)
    monkeypatch.setattr(
        auto_profile, "measure_device", lambda **given: pytest.fail("measured while serving")
    )
    _, profile = scheduler._reload()
    assert profile.hardware == "cpu"


def test_reload_of_unchanged_policy_keeps_correction(build) -> None:
    scheduler, _ = build()
    scheduler.live_policy.loaded = scheduler._reload()
    assert scheduler.live_policy.apply_loaded()["result"] == "unchanged"


def test_engine_is_described_as_vllm_has_it() -> None:
    config = build_scheduler().vllm_config
    hardware = describe_hardware(config)
    assert (hardware.kind, hardware.dtype, hardware.here) == ("cpu", "float32", True)
    assert hardware.memory > 1
    parallel, facts = describe_model(config)
    model = ModelShape.from_config(**facts)
    assert (parallel, model.width, model.inner, model.layers) == (1, 64, 128, 1)
    assert model.weight_bytes == model.kv_bytes == 4


MODULE = "vllm_semantic_sched.engine.startup.device_benchmark"


def measure_small_model() -> tuple[Device, ModelShape]:
    config = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
    }
    model = ModelShape.from_config("small", config, dtype="float32")
    return measure_device("cpu", "this processor", "float32", model), model


def test_processor_is_measured_with_the_models_matrices(monkeypatch) -> None:
    seconds = {"product": 1e-3, "reading": 2e-3, "copying": 4e-3, "small": 1e-4}
    order = iter(seconds.values())

    def fastest(work, wait) -> float:
        work()
        wait()
        return next(order)

    monkeypatch.setattr(f"{MODULE}._fastest", fastest)
    device, model = measure_small_model()
    # 512 tokens through a matrix of 256 x 1,024: two operations for each weight and token.
    assert device.bf16 == pytest.approx(2 * 512 * 256 * 1024 / 1e-3 / 1e12)
    rows = int(model.weights / 4 / 256)
    assert device.bandwidth == pytest.approx(rows * 256 * 4 / 2e-3 / 1e9)
    assert device.host == pytest.approx(2**26 / 4e-3 / 1e9)
    # A hundred small operations take 1e-4 s; a step has 1,000 of them, a layer 50.
    assert device.step == pytest.approx(1e-3)
    assert device.layer == pytest.approx(5e-5)
    assert device.measured


def test_every_figure_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(f"{MODULE}._SECONDS", 0.01)
    device, _ = measure_small_model()
    assert min(device.bf16, device.bandwidth, device.host, device.step, device.layer) > 0
