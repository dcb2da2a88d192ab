"""Asynchronous scheduling on the CPU engine: what every GPU user runs."""

from typing import Any


def schedule_asynchronously() -> None:
    """Switch on what vLLM switches off on a CPU: two steps in flight, as on a GPU. To be called
    before the engine is made, in its process."""
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        switch_off(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
