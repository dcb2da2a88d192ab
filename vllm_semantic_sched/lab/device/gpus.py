"""The GPUs that can be emulated by name, with an 8B model on them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_semantic_sched.policy.profile.devices import device_named
from vllm_semantic_sched.policy.profile.formula import load_profile, write_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline


@dataclass(frozen=True)
class Gpu:
    """`profile`: name or path; `memory`: as in `DeviceSettings`, in GiB."""

    profile: str
    seats: int
    memory: Mapping[str, float]


_BESIDE_WEIGHTS = {"kv_gib": 58.0}  # of 80 GB, beside an 8B model in bf16
SHIPPED = {
    "a100": Gpu("default", 128, _BESIDE_WEIGHTS),
    "h100": Gpu("h100-8b", 256, _BESIDE_WEIGHTS),
}
"""Those with a profile in configs/profiles, as in docs/measurements/emulated-gpu.md."""
_SEATS = 256  # vLLM's default for most GPUs


def find_gpu(name: str, model: Path, folder: Path) -> Gpu:
    """A GPU by name, or by the path of an engine profile, with the memory of an A100. Where no
    profile is shipped, the one that is derived for the model is written into `folder`. PolicyError:
    no such name, or a wrong profile; ValueError: the model does not fit."""
    if name in SHIPPED:
        return SHIPPED[name]
    if Path(name).is_file():
        load_profile(name)
        a100 = SHIPPED["a100"]
        return Gpu(str(Path(name).resolve()), a100.seats, a100.memory)
    device = device_named(name)
    config = json.loads((model / "config.json").read_text())
    roofline = Roofline(ModelShape.from_config(model.name, config), device)
    if not roofline.kv_tokens:
        raise ValueError(f"the model's weights do not fit the {device.memory:g} GB of {name}")
    path = folder / f"profile-{name}.yaml"
    write_profile(roofline.profile(), path)
    return Gpu(str(path.resolve()), _SEATS, {"memory_gib": device.memory * 1e9 / 2**30})
