"""What an emulated device is: `--additional-config '{"emulated_device": {...}}'`."""

from typing import Any

from pydantic import Field

from vllm_semantic_sched.policy.config.section import Section, parse_section

KEY = "emulated_device"
VARIABLE = "SEMSCHED_EMULATED_DEVICE"
"""Environment variable that makes the general plugin act: `1`."""
WORKER = "vllm_semantic_sched.lab.device.worker.EmulatedWorker"
"""For vLLM's `--worker-cls`."""


class DeviceSettings(Section):
    """It holds names and numbers only, because vLLM hashes the dict."""

    profile: str = "default"
    """Engine profile of the device: a shipped name or a path."""
    kv_gib: float | None = Field(None, gt=0)
    """Memory for KV; unset: what the weights leave of `memory_gib`."""
    memory_gib: float = Field(80.0, gt=0)
    """Memory of the device; vLLM uses the part `--gpu-memory-utilization` of it."""
    adapter_seconds: float = Field(0.008, ge=0)
    """Time that a step takes longer for each LoRA adapter that it needs and the device does not
    hold: 160 MiB at 20 GiB/s by default."""
    image_token_seconds: float = Field(2e-5, ge=0)
    """Time that a step takes longer for each token of an image that it encodes."""
    noise: float = Field(0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of step times."""
    seed: int = 0
    """Of the noise."""
    acceptance: float = Field(0.7, ge=0, le=1)
    """Share of drafted tokens that are the right ones, with speculative decoding."""
    trace: str | None = None
    """File for a JSON line per step."""


def device_settings(additional_config: Any) -> DeviceSettings:
    """The settings of a server; PolicyError if they are invalid."""
    given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    return parse_section(DeviceSettings, given or {}, KEY)
