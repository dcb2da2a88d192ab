"""Schedulers without a model."""

from collections.abc import Callable
from functools import partial
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
