"""Ways to start vLLM with the emulated device."""

import json
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from vllm.platforms.cpu import CpuPlatform

from vllm_semantic_sched.lab.device.launch import keep_scheduling_mode, plugin
from vllm_semantic_sched.lab.device.model import SHAPES, make_shape
from vllm_semantic_sched.lab.device.settings import VARIABLE, DeviceSettings, device_settings
from vllm_semantic_sched.policy.config.section import PolicyError

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def platform(monkeypatch) -> type[CpuPlatform]:
    """As vLLM left it, also afterwards."""
    monkeypatch.setattr(
        CpuPlatform, "check_and_update_config", classmethod(lambda cls, config: None)
    )
    return CpuPlatform


@pytest.mark.parametrize(("value", "acts"), [(None, False), ("0", False), ("1", True)])
def test_plugin_acts_only_if_asked_to(platform, monkeypatch, value, acts) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    before = platform.check_and_update_config.__func__
    plugin()
    assert (platform.check_and_update_config.__func__ is not before) == acts


def test_platform_is_changed_once(platform) -> None:
    keep_scheduling_mode()
    once = platform.check_and_update_config.__func__
    keep_scheduling_mode()
    assert platform.check_and_update_config.__func__ is once


def test_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["vllm.general_plugins"].values()
    module, name = place.split(":")
    assert getattr(import_module(module), name) is plugin


def test_settings_name_unknown_keys() -> None:
    assert device_settings({"emulated_device": {"profile": "h100-8b"}}).profile == "h100-8b"
    assert device_settings({}) == device_settings(None) == DeviceSettings()
    with pytest.raises(PolicyError, match="emulated_device: profil: unknown key"):
        device_settings({"emulated_device": {"profil": "h100-8b"}})


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_is_written_once(shape, tmp_path) -> None:
    assert make_shape(tmp_path, shape)
    assert not make_shape(tmp_path, shape)
    assert json.loads((tmp_path / "config.json").read_text()) == SHAPES[shape]
    assert not list(tmp_path.glob("*.safetensors"))


def test_answers_by_the_clock_on_the_wall(run_offline, tmp_path) -> None:
    """A real engine with a tokenizer: asynchronous, as long as the answer is, and no faster than
    the device."""
    program, trace = tmp_path / "program.py", tmp_path / "trace"
    make_shape(tmp_path / "model", tokenizer=True)
    program.write_text(
        f"""
import json, time
from vllm_semantic_sched.lab.device.launch import keep_scheduling_mode
from vllm_semantic_sched.lab.device.settings import WORKER
keep_scheduling_mode()
from vllm import LLM, SamplingParams
device = {{"profile": "h100-8b", "memory_gib": 40, "trace": {str(trace)!r}}}
llm = LLM({str(tmp_path / "model")!r}, worker_cls=WORKER, max_model_len=2048,
          additional_config={{"emulated_device": device}})
config = llm.llm_engine.vllm_config
params = SamplingParams(max_tokens=500, extra_args={{"bench_answer": [40, 2]}})
begin = time.monotonic()
answers = llm.generate(["tell me about rain"] * 3, params, use_tqdm=False)
print(json.dumps([time.monotonic() - begin, config.scheduler_config.async_scheduling,
                  config.cache_config.num_gpu_blocks * config.cache_config.block_size,
                  [len(one.outputs[0].token_ids) for one in answers],
                  len({{one.outputs[0].text for one in answers}})]))
llm.llm_engine.engine_core.shutdown()
"""
    )
    seconds, asynchronous, tokens, lengths, texts = json.loads(
        next(line for line in run_offline(program).splitlines() if line.startswith("["))
    )
    assert asynchronous and lengths == [40, 40, 40] and texts == 1
    # 40 GiB, of which vLLM uses 92 %, less 15 GiB of weights and 2 for activations, at 128 KiB.
    assert tokens == pytest.approx((40 * 0.92 - 15 - 2) * 2**13, rel=0.1)
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sum(step["sampled"] for step in steps) >= 120
    assert sum(step["seconds"] for step in steps) <= seconds + 0.01
