"""Writes a trained network as `predict.weights` reads it."""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_semantic_sched.predict import WEIGHTS_FILES
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier
from vllm_semantic_sched.predict.weights import EMBEDDINGS, SCALE

# Of matrices. A fine-tuned network needs fp16: many weights move by less than half a step of int8.
Precision = Literal["int8", "fp16"]


def quantized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every matrix (rows, columns) as int8 and its row scales (rows,) beside it."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() == 2:
            scale = value.abs().amax(dim=1).clamp(min=1e-12) / 127.0
            rounded = torch.round(value / scale[:, None]).to(torch.int8)
            stored |= {name: rounded, name + SCALE: scale.to(torch.float32)}
        else:
            stored[name] = value.to(torch.float32)
    return stored


def _halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every matrix (rows, columns) as fp16."""
    return {name: value.half() if value.dim() == 2 else value for name, value in state.items()}


def save_network(
    network: UrgencyLengthClassifier,
    tokenizer_from: Path | None,
    folder: Path,
    precision: Precision = "int8",
) -> None:
    """Write the network to `folder`, with the tokenizer files of `tokenizer_from`; None for a
    second network, which has tokenizer and word embeddings of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    state = network.state_dict()
    if tokenizer_from is None:
        state = {name: value for name, value in state.items() if not name.startswith(EMBEDDINGS)}
    stored = quantized(state) if precision == "int8" else _halved(state)
    stored = {name: value.contiguous() for name, value in stored.items()}
    save_file(stored, folder / WEIGHTS_FILES[precision])
    # After the new weights are written: a failure must not leave the folder without any.
    for old_precision in WEIGHTS_FILES.keys() - {precision}:
        (folder / WEIGHTS_FILES[old_precision]).unlink(missing_ok=True)
    config = network.config.to_diff_dict()
    config["architectures"] = [type(network).__name__]
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if tokenizer_from not in (None, folder):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_from / name, folder / name)
