"""Models for the emulated device."""

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_semantic_sched.lab.device.model import make_shape


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a shape, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")

    def model(shape: str) -> Path:
        make_shape(folder / shape, shape, tokenizer=True)
        return folder / shape

    return model
