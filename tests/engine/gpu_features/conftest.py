"""Schedulers for requests that use features of GPU servers, without a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml
from fake_device import swap_config
from schedulers import build_ours, build_vllms
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.profile import cost


@pytest.fixture
def build(tmp_path) -> Callable[..., SemanticScheduler]:
    """Builds our scheduler, see `schedulers.build_ours`."""
    return partial(build_ours, tmp_path)


@pytest.fixture
def build_swapping(build, monkeypatch) -> Callable[..., SemanticScheduler]:
    """Builds our scheduler with the swap connector; by default all loads run beside steps."""

    def build_swapping(text: str = "", max_stall: float = 0.0, **options: Any) -> SemanticScheduler:
        monkeypatch.setattr(cost, "MAX_STALL", max_stall)
        text += "retention: {mode: swap}\n"
        return build(text, **{"kv_transfer_config": swap_config(), "host_blocks": 200} | options)

    return build_swapping


@pytest.fixture
def build_stock() -> Callable[..., Scheduler]:
    """Builds vLLM's own scheduler, see `schedulers.build_vllms`."""
    return build_vllms


@pytest.fixture
def shipped() -> Callable[..., str]:
    """Text of a shipped policy without predictor, corrections of the profile and some sections."""

    def shipped(name: str, *without: str, **changes: Any) -> str:
        keys, _ = read_config(name, kind="policy")
        keys = {key: value for key, value in keys.items() if key not in without} | changes
        keys |= {"predictor": keys.get("predictor", {}) | {"enabled": False}}
        return yaml.safe_dump(keys)

    return shipped


class Clock:
    """Seconds that pass only as a test says."""

    def __init__(self, scheduler: SemanticScheduler) -> None:
        self.now = 100.0
        scheduler.clock.seconds = lambda: self.now
        scheduler.clock._paused = 0.0


@pytest.fixture
def clock_of() -> Callable[[SemanticScheduler], Clock]:
    """Takes a scheduler's clock from it."""
    return Clock
