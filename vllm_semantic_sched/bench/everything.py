"""A policy that switches everything on that a step can pay for, to measure what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

EVERYTHING: dict[str, Any] = {
    "tiers": [
        {"name": "system", "reserve": {"seats": 8, "kv": 0.02}},
        {"name": "premium", "share": 0.5, "slo": {"ttft": 1.0}},
        {"name": "standard", "share": 0.3, "slo": {"ttft": 3.0}},
        {"name": "batch", "reserve": {"seats": 4, "mode": "soft"}},
        {"name": "background", "share": 0.05},
    ],
    "aging": {"enabled": True, "step": 0.25},
    "deadlines": {"enabled": True},
    "fair_share": {"enabled": True, "max_levels": 2.0},
    "tenants": {"fair": True, "top": {"share": 0.5}},
}


def write_everything(folder: Path) -> Path:
    """Write the policy into a folder; returns its path."""
    path = folder / "everything.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING, sort_keys=False))
    return path
