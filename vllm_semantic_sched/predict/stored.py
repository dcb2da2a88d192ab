"""The folder of a stored network (`weights.py`), as far as it can be read without torch."""

import json
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.predict import SHIPPED_WEIGHTS

WEIGHTS_FILES = {"int8": "model.int8.safetensors", "fp16": "model.fp16.safetensors"}
"""Names of the weights' files by precision."""


def weights_file(folder: Path) -> Path | None:
    """The weights of a stored network; None if the folder has none."""
    paths = (folder / name for name in WEIGHTS_FILES.values())
    return next((path for path in paths if path.is_file()), None)


def buckets_of(settings: dict[str, Any]) -> LengthBuckets:
    """The length buckets in the config of a stored network."""
    return LengthBuckets(
        tuple(settings["length_bucket_edges"]), tuple(settings["length_bucket_means"])
    )


def stored_buckets(path: str | None) -> LengthBuckets | None:
    """The length buckets of the shipped model (`path` None) or of a stored network; None for
    another model, and for a folder that lacks a file or is damaged."""
    folder = SHIPPED_WEIGHTS if path is None else Path(path)
    files = ("tokenizer.json", "tokenizer_config.json")
    if weights_file(folder) is None or not all((folder / name).is_file() for name in files):
        return None
    try:
        return buckets_of(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, KeyError, TypeError, ValueError):
        return None
