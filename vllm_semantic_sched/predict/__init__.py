"""The predictor of urgency level and output length: what a serving engine needs.

`instant` reads a text at once, in the engine's process. `model` reads it better, `worker` runs it
in a process of its own, and `service` feeds that process from the engine. `training/` makes models
and `evaluation/` measures them; neither is needed to serve.
See docs/predictor.md. Only modules below this package import torch and transformers.
"""

from pathlib import Path

URGENCY_LEVELS = 5
"""Levels 0 (immediate) to 4 (non-urgent), as in the five-level triage scales."""

SHIPPED_WEIGHTS = Path(__file__).resolve().parent / "weights"
"""Folder of the model that ships with the package."""
