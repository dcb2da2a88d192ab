"""The predictor of urgency level and output length at run time, see docs/predictor.md.

`instant` reads a text at once, in the engine's process. `model` reads it better, in a process of
its own (`worker`), which `service` feeds from the engine.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

# Levels 0 (immediate) to 4 (non-urgent), as in the five-level triage scales.
URGENCY_LEVELS = 5
# Folder of the model that ships with the package.
SHIPPED_WEIGHTS = Path(__file__).resolve().parent / "weights"
# Names of the weights' files by precision.
WEIGHTS_FILES = {"int8": "model.int8.safetensors", "fp16": "model.fp16.safetensors"}
SECOND = "second"  # the folder of a model's second network, in its own


def weights_file(folder: Path) -> Path | None:
    """The weights of a stored network; None if the folder has none."""
    paths = (folder / name for name in WEIGHTS_FILES.values())
    return next((path for path in paths if path.is_file()), None)


def model_hash(path: str | None) -> str:
    """Twelve hex digits of a model's files (`path` None: the shipped one); empty without files."""
    folder = SHIPPED_WEIGHTS if path is None else Path(path)
    names = ("config.json", *WEIGHTS_FILES.values(), "instant.npz")
    digest = hashlib.sha256()
    has_files = False
    for part in (folder, folder / SECOND):
        for name in names:
            file = part / name
            if file.is_file():
                has_files = True
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12] if has_files else ""


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
