"""Schedulers without a model, and models for the emulated device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def build(tmp_path) -> Callable[..., Any]:
    """Builds our scheduler, see `schedulers.build_ours`."""
    from schedulers import build_ours

    return partial(build_ours, tmp_path)


@pytest.fixture
def build_stock() -> Callable[..., Any]:
    """Builds vLLM's own scheduler, see `schedulers.build_vllms`."""
    from schedulers import build_vllms

    return build_vllms


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a shape, with a tokenizer."""
    from vllm_semantic_sched.lab.device.model import make_shape

    folder = tmp_path_factory.mktemp("models")

    def model(shape: str) -> Path:
        make_shape(folder / shape, shape, tokenizer=True)
        return folder / shape

    return model
