"""Profiles derived from a model's configuration and a device's figures."""

import pytest

from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.devices import (
    Device,
    device_named,
    known_devices,
    nearest_device,
    recognize,
)
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile, load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
DEEPSEEK = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GRANITE_HYBRID = {
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_n_heads": 48,
    "mamba_d_state": 128,
    "vocab_size": 100352,
    "dtype": "bfloat16",
}
MODELS = {
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "qwen-moe": QWEN_MOE,
    "deepseek": DEEPSEEK,
    "granite-hybrid": GRANITE_HYBRID,
}


def shape(config: dict, **options) -> ModelShape:
    return ModelShape.from_config("model", config, **options)


def derived(config: dict, device: str = "h100", devices: int = 1) -> EngineProfile:
    return Roofline(shape(config), device_named(device), devices).profile()


@pytest.mark.parametrize(
    ("name", "total", "active", "kv"),
    [
        # Billions of parameters by the model cards, less input embeddings; KV numbers per token.
        ("llama", 8.03 - 0.53, 8.03 - 0.53, 2 * 32 * 8 * 128),
        ("mixtral", 46.7 - 0.13, 12.9 - 0.13, 2 * 32 * 8 * 128),
        ("qwen-moe", 30.5 - 0.31, 3.3 - 0.31, 2 * 48 * 4 * 128),
        ("deepseek", 671 - 0.93, 37 - 0.93, 61 * 576),
        ("granite-hybrid", 6.94, 1.47, 2 * 4 * 4 * 128),  # tied embeddings; states are no KV
    ],
)
def test_parameters_are_those_of_the_model_cards(name, total, active, kv) -> None:
    model = shape(MODELS[name])
    assert model.weights / model.weight_bytes / 1e9 == pytest.approx(total, rel=0.02)
    used = model.active_parameters + model.head_parameters
    assert used / 1e9 == pytest.approx(active, rel=0.03)
    assert model.kv_numbers == kv


@pytest.mark.parametrize(
    ("config", "options", "bits", "eight"),
    [
        ({}, {}, 16, False),
        ({}, {"dtype": "torch.float32"}, 32, False),
        ({}, {"quantization": "fp8"}, 8, True),
        ({"quant_method": "fp8"}, {}, 8, True),
        ({"quant_method": "awq", "bits": 4}, {}, 4, False),
        ({"quant_method": "gptq", "bits": 8}, {}, 8, False),
        ({"quant_method": "mxfp4"}, {}, 4, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}
                },
            },
            {},
            8,
            True,
        ),
    ],
)
def test_quantization(config, options, bits, eight) -> None:
    model = shape(LLAMA | {"quantization_config": config}, **options)
    assert (model.weight_bytes, model.eight_bits) == (bits / 8, eight)


def test_configuration_of_a_multimodal_model_and_missing_numbers() -> None:
    assert shape({"text_config": LLAMA, "torch_dtype": "bfloat16"}) == shape(LLAMA)
    assert shape(LLAMA, kv_cache_dtype="fp8_e4m3").kv_bytes_per_token == 64 * 1024
    kinds = ["sliding_attention", "full_attention"] * 16
    assert shape(LLAMA | {"layer_types": kinds}).full_layers == 16
    with pytest.raises(ValueError, match="lacks num_hidden_layers"):
        shape({"hidden_size": 64})


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_devices_are_recognized_by_the_names_of_drivers(driver, name) -> None:
    found = recognize(driver)
    assert (found and found.name) == name


def test_unknown_devices() -> None:
    with pytest.raises(PolicyError, match="Did you mean 'h100'"):
        device_named("h1000")
    assert nearest_device(38.0).name == "a100-40gb"
    assert nearest_device(79.0).name == "a100"  # of those with 80 GB, the slowest


def test_default_profile_is_the_one_that_its_file_says() -> None:
    model = ModelShape.from_config("Llama-3.1-8B", LLAMA)
    assert load_profile("default") == Roofline(model, device_named("a100")).profile()
    assert load_profile("auto") == load_profile("default")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 4])
def test_profile_stays_near_the_roofline(name, devices) -> None:
    roofline = Roofline(shape(MODELS[name]), device_named("h100"), devices)
    profile = roofline.profile()
    for tokens in (64, 256, 1024, 2048, 8192):
        assert profile.prefill_alone(tokens) == pytest.approx(roofline.prefill(tokens), rel=0.2)
    # With experts the straight line misses the bend where the last ones come into use.
    allowed = 0.6 if roofline.model.experts else 0.03
    for decodes in (1, 8, 32, 64, 128, 256):
        batch = Batch(decodes=decodes, context=1000 * decodes)
        assert profile.step(batch) == pytest.approx(roofline.step(batch), rel=allowed)
    assert profile.decode(1000, 1) == pytest.approx(
        roofline.step(Batch(decodes=1, context=1001)), rel=0.01
    )


def test_more_devices_and_smaller_numbers_are_faster() -> None:
    one, four = derived(LLAMA), derived(LLAMA, devices=4)
    assert four.hardware == "4 x h100"
    assert one.alpha2 / 4 < four.alpha2 < one.alpha2 / 2  # norms are not split
    assert four.beta_load == pytest.approx(one.beta_load / 4, rel=1e-3)
    assert derived(LLAMA).gamma2 > derived(LLAMA, "h200").gamma2
    eight = derived(LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    assert eight.gamma2 < one.gamma2 and eight.alpha2 < 0.7 * one.alpha2
    # Without 8-bit arithmetic only the weights get smaller.
    old = derived(LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "a100")
    assert (
        old.alpha2 == derived(LLAMA, "a100").alpha2 and old.gamma2 < derived(LLAMA, "a100").gamma2
    )


def test_kv_cache_is_what_the_weights_leave() -> None:
    fits = Roofline(shape(LLAMA), device_named("a100"))
    assert fits.kv_tokens * 131072 == pytest.approx(0.9 * 80e9 - 16.06e9, rel=0.01)
    assert Roofline(shape(DEEPSEEK), device_named("h100")).kv_tokens == 0


def test_figures_of_a_benchmark_are_used_as_they_are() -> None:
    device = Device(
        name="x", bf16=1.0, memory=8, bandwidth=10, host=5, step=0.001, layer=0.0, measured=True
    )
    roofline = Roofline(shape(LLAMA), device)
    read = 7.5e9 * 2 / 10e9
    assert roofline.step(Batch(decodes=1)) == pytest.approx(read, rel=0.02)
    assert roofline.profile().load(1000) == pytest.approx(1000 * 131072 / 5e9, rel=0.01)


# The sanity of all profiles. A prompt cannot be computed faster than its arithmetic at the device's
# peak, and a profile that says ten times as long is wrong: 35 s for 8,000 tokens, once the default.
PAPER = {"a100-qwen1.5-4b", "a100-qwen1.5-7b", "a5000-qwen1.5-4b", "a5000-qwen1.5-7b"}
SMALL_CPU = {"num_key_value_heads": 4, "vocab_size": 32768, "torch_dtype": "float32"}
# TFLOP/s and the model of each shipped profile. The processor's two cores: by its matrix products.
SHIPPED = {
    "default": (312.0, LLAMA),
    "h100-8b": (989.0, LLAMA),
    "phone": (4.0, LLAMA | {"num_hidden_layers": 16}),
    "cpu-2core-tiny": (
        0.2,
        SMALL_CPU
        | {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
        | {"num_key_value_heads": 2, "intermediate_size": 1024},
    ),
    "cpu-2core-small": (
        0.2,
        SMALL_CPU
        | {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
        | {"intermediate_size": 1408},
    ),
}


def peak_seconds(config: dict, peak: float, tokens: int) -> float:
    """Arithmetic of a prompt at the peak, and nothing else."""
    model = shape(config)
    attention = 2 * model.full_layers * model.heads * model.head_dim * tokens**2
    return (2 * model.active_parameters * tokens + attention) / (peak * 1e12)


@pytest.mark.parametrize("name", sorted(set(shipped_names("profile")) - PAPER))
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_shipped_profiles_are_at_most_ten_times_the_roofline(name, tokens) -> None:
    peak, config = SHIPPED[name]
    assert load_profile(name).prefill(0, tokens) < 10 * peak_seconds(config, peak, tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", sorted(known_devices()))
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_derived_profiles_are_at_most_ten_times_the_roofline(name, device, tokens) -> None:
    found = device_named(device)
    peak = found.fp8 if name == "deepseek" and found.fp8 else found.bf16
    least = peak_seconds(MODELS[name], peak, tokens)
    assert least < derived(MODELS[name], device).prefill_alone(tokens) < 10 * least


def test_the_profile_of_the_paper_would_fail() -> None:
    seconds = load_profile("a100-qwen1.5-7b").prefill(0, 8192)
    assert seconds > 10 * peak_seconds(LLAMA, 312.0, 8192)
