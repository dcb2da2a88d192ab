"""The stored form of a trained network: a folder with weights, config and tokenizer.

Matrices are stored as int8 with one fp32 scale per row, or as fp16; other weights as fp32.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DistilBertConfig
from transformers.initialization import no_init_weights

from vllm_semantic_sched.predict import WEIGHTS_FILES, weights_file
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

# The number format of stored matrices. A fine-tuned network needs fp16: many of its weights move by
# less than half a step of int8.
Precision = Literal["int8", "fp16"]
_SCALE = ".row_scale"


def quantized(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with every matrix (rows, columns) as int8 and its row scales (rows,) beside it."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() == 2:
            scale = value.abs().amax(dim=1).clamp(min=1e-12) / 127.0
            stored[name] = torch.round(value / scale[:, None]).to(torch.int8)
            stored[name + _SCALE] = scale.to(torch.float32)
        else:
            stored[name] = value.to(torch.float32)
    return stored


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 state that `stored` encodes; the error is at most half a row scale."""
    return {
        name: value.to(torch.float32) * stored[name + _SCALE][:, None]
        if name + _SCALE in stored
        else value
        for name, value in stored.items()
        if not name.endswith(_SCALE)
    }


def save_network(
    network: UrgencyLengthClassifier,
    tokenizer_from: Path,
    folder: Path,
    precision: Precision = "int8",
) -> None:
    """Write the network to `folder`, with the tokenizer files of `tokenizer_from`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = network.state_dict()
    halved = ((name, one.half() if one.dim() == 2 else one) for name, one in state.items())
    stored = quantized(state) if precision == "int8" else dict(halved)
    stored = {name: one.contiguous() for name, one in stored.items()}
    save_file(stored, folder / WEIGHTS_FILES[precision])
    # After the new weights are written: a failure must not leave the folder without any.
    for other in WEIGHTS_FILES.keys() - {precision}:
        (folder / WEIGHTS_FILES[other]).unlink(missing_ok=True)
    config = network.config.to_diff_dict()
    config["architectures"] = [type(network).__name__]
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if tokenizer_from != folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_from / name, folder / name)


def load_network(folder: Path) -> UrgencyLengthClassifier:
    """The network stored in `folder`, in fp32 and evaluation mode."""
    config = DistilBertConfig.from_json_file(folder / "config.json")
    # transformers takes this one for a setting of text generation, and leaves it out.
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    config.temperature = settings.get("temperature", 1.0)
    with no_init_weights():  # random ones would take longer than all else here
        network = UrgencyLengthClassifier(config)
    path = weights_file(folder)
    if path is None:
        raise FileNotFoundError(f"no weights in {folder}: {' or '.join(WEIGHTS_FILES.values())}")
    network.load_state_dict(dequantized(load_file(path)))
    network.eval()
    return network
