"""Writes the model of a check: a small one of random weights with heads of 128, which the packed
attention kernels are for."""

import sys
from dataclasses import replace
from pathlib import Path

from vllm_semantic_sched.lab.bench.tiny_model import SIZES, make_model


def make_small_model(folder: Path, layers: int = SIZES["tiny"].num_hidden_layers) -> None:
    """Write the model into `folder`, unless it is there."""
    shape = replace(SIZES["tiny"], num_attention_heads=3, num_key_value_heads=1)
    make_model(folder, replace(shape, num_hidden_layers=layers))


if __name__ == "__main__":
    make_small_model(Path(sys.argv[1]))
