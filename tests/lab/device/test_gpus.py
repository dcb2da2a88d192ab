"""GPUs that are emulated by name, and loads for them."""

import pytest

from vllm_semantic_sched.lab.bench.prompts import Size
from vllm_semantic_sched.lab.device.gpus import SHIPPED, find_gpu
from vllm_semantic_sched.lab.device.load import LoadConfig, load_of, trace_load
from vllm_semantic_sched.lab.device.model import make_shape
from vllm_semantic_sched.lab.device.settings import DeviceSettings
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import load_profile, write_profile


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    make_shape(folder)
    return folder


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "l4"])
def test_named_gpu_has_a_profile_and_settings_of_the_device(name, shape, tmp_path):
    gpu = find_gpu(name, shape, tmp_path)
    assert load_profile(gpu.profile).hardware == name
    assert DeviceSettings(profile=gpu.profile, **gpu.memory) and gpu.seats > 0
    assert bool(list(tmp_path.iterdir())) == (name not in SHIPPED)  # derived for the model


def test_file_is_a_profile_and_a_wrong_name_is_refused(shape, tmp_path):
    path = tmp_path / "mine.yaml"
    write_profile(load_profile("h100-8b"), path)
    gpu = find_gpu(str(path), shape, tmp_path)
    assert gpu.profile == str(path) and gpu.seats == SHIPPED["a100"].seats
    with pytest.raises(PolicyError, match="Did you mean 'h100'"):
        find_gpu("h1000", shape, tmp_path)
    with pytest.raises(ValueError, match="do not fit the 16 GB of t4"):
        find_gpu("t4", shape, tmp_path)


def test_prompts_of_a_trace_share_the_tokens_of_their_blocks():
    sizes = [Size(1100, 5, 0.0, (1, 2, 3)), Size(700, 5, 1.0, (1, 4)), Size(300, 5, 4.0, (1,))]
    first, second, short = trace_load(sizes, LoadConfig(rate=2.0))
    assert [len(one.prompt) for one in (first, second, short)] == [1100, 700, 300]
    assert first.prompt[:512] == second.prompt[:512] != short.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]
    assert [one.arrival for one in (first, second, short)] == [0.0, 0.5, 2.0]


def test_load_of_named_prompts_or_a_trace_has_their_lengths(tmp_path):
    load = load_of("long", LoadConfig(requests=50))
    assert 3000 < sorted(len(one.prompt) for one in load)[25] < 10_000
    path = tmp_path / "trace.csv"
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,396,109\n"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    load = load_of(str(path), LoadConfig(requests=2, rate=4.0))
    assert [(len(one.prompt), one.answer) for one in load] == [(374, 44), (396, 109)]
    assert load[1].arrival == 0.25
