"""Ways to start vLLM with the emulated device: a general plugin, and the same as a function."""

import os
from typing import Any

from vllm_semantic_sched.lab.device.settings import VARIABLE

_KEPT = {
    "scheduler_config": ("async_scheduling", "enable_chunked_prefill", "max_num_batched_tokens"),
    "cache_config": ("enable_prefix_caching", "mamba_ssm_cache_dtype"),
}
"""Options that the CPU platform changes for its kernels."""


def plugin() -> None:
    """The entry point `vllm.general_plugins`: does nothing unless the environment variable
    SEMSCHED_EMULATED_DEVICE is 1."""
    if os.environ.get(VARIABLE) == "1":
        keep_scheduling_mode()


def keep_scheduling_mode() -> None:
    """Let the CPU platform leave the scheduling mode and the executor as they were chosen: by
    default, asynchronous scheduling in one process, as on a GPU; with what it forbids for its own
    kernels (of MLA, of Mamba states). To be called before the engine's configuration is made;
    again, it does nothing."""
    from vllm.platforms.cpu import CpuPlatform

    change = CpuPlatform.check_and_update_config
    if getattr(change, "keeps_scheduling_mode", False):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        chosen = []
        for part, names in _KEPT.items():
            section = getattr(vllm_config, part)
            chosen += [(section, name, getattr(section, name)) for name in names]
        change(vllm_config)
        for section, name, value in chosen:
            setattr(section, name, value)
        vllm_config.parallel_config.distributed_executor_backend = "uni"

    check_and_update_config.keeps_scheduling_mode = True  # type: ignore[attr-defined]
    setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))  # noqa: B010
