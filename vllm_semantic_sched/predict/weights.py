"""Reads a trained network: a folder with weights, config and tokenizer (`training/stored.py`).

Matrices are stored as int8 with one fp32 scale per row, or as fp16; other weights as fp32.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DistilBertConfig
from transformers.initialization import no_init_weights

from vllm_semantic_sched.predict import SECOND, WEIGHTS_FILES, weights_file
from vllm_semantic_sched.predict.network import UrgencyLengthClassifier

SCALE = ".row_scale"  # at the end of a name: the scales of a matrix
EMBEDDINGS = "distilbert.embeddings."  # which a second network has from the first


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 state that `stored` encodes; the error is at most half a row scale."""
    state = {}
    for name, value in stored.items():
        if name.endswith(SCALE):
            continue
        scales = stored.get(name + SCALE)
        state[name] = value if scales is None else value.to(torch.float32) * scales[:, None]
    return state


def load_second(folder: Path, first: UrgencyLengthClassifier) -> UrgencyLengthClassifier | None:
    """The network that reads doubtful texts again, with the word embeddings of the `first` one;
    None if the model in `folder` has none. See `load_network`."""
    return load_network(folder / SECOND, first) if (folder / SECOND).is_dir() else None


def load_network(
    folder: Path, shared: UrgencyLengthClassifier | None = None
) -> UrgencyLengthClassifier:
    """The network stored in `folder`, in fp32 and evaluation mode; `shared` has its embeddings if
    they are not stored."""
    config = DistilBertConfig.from_json_file(folder / "config.json")
    # transformers takes the first for a setting of text generation, and leaves it out.
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    for name in ("temperature", "length_temperature"):
        setattr(config, name, settings.get(name, 1.0))
    with no_init_weights():  # random ones would take longer than all else here
        network = UrgencyLengthClassifier(config)
    path = weights_file(folder)
    if path is None:
        raise FileNotFoundError(f"no weights in {folder}: {' or '.join(WEIGHTS_FILES.values())}")
    state = dequantized(load_file(path))
    if shared is not None:
        network.distilbert.embeddings = shared.distilbert.embeddings
        others = shared.state_dict().items()
        state |= {name: value for name, value in others if name.startswith(EMBEDDINGS)}
    network.load_state_dict(state)
    network.eval()
    return network
