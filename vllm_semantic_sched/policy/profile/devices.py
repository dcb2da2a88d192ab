"""The devices of devices.yaml, and what each can do."""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import Field

from vllm_semantic_sched.policy.config.section import PolicyError, Section, nearest, parse_section


class Device(Section):
    """What an accelerator, or a processor, can do."""

    name: str  # in `--device`
    match: tuple[str, ...] = ()  # words by which drivers name it
    bf16: float = Field(gt=0)  # TFLOP/s in 16 bits, dense
    fp8: float | None = Field(None, gt=0)  # TFLOP/s in 8 bits, if it has them
    memory: float = Field(gt=0)  # GB
    bandwidth: float = Field(gt=0)  # GB/s of its memory
    host: float = Field(gt=0)  # GB/s to or from the host, one direction
    step: float = Field(0.002, ge=0)  # seconds per step for scheduling, inputs and sampling
    layer: float = Field(3e-5, ge=0)  # seconds per layer and step for its kernels
    measured: bool = False  # the figures were reached in a benchmark; otherwise they are peaks


@functools.cache
def known_devices() -> Mapping[str, Device]:
    """The devices of devices.yaml, by name."""
    path = Path(__file__).with_name("devices.yaml")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    devices = [parse_section(Device, row, path.name) for row in rows]
    return {device.name: device for device in devices}


def device_named(name: str) -> Device:
    """A device of devices.yaml; PolicyError, with the names, if there is none of that name."""
    names = known_devices()
    if name.lower() in names:
        return names[name.lower()]
    near = nearest(name.lower(), names)
    hint = f" Did you mean {near}?" if near else ""
    raise PolicyError(f"device {name!r} is not known.{hint} Known: {', '.join(names)}")


def recognize(driver_name: str) -> Device | None:
    """The device with this name of a driver (`NVIDIA H100 80GB HBM3`); None if unknown."""
    by_word = {}
    for device in known_devices().values():
        for word in device.match:
            if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", driver_name, re.IGNORECASE):
                by_word[word] = device
    if not by_word:
        return None
    longest = max(by_word, key=len)
    return by_word[longest]


def nearest_device(memory: float) -> Device:
    """The known accelerator whose memory is nearest to this many GB; of several, the slowest."""
    devices = [device for device in known_devices().values() if device.match]

    def distance(device: Device) -> tuple[float, float]:
        return abs(math.log(device.memory / memory)), device.bf16

    return min(devices, key=distance)
