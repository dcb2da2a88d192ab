"""Writes the decision of a model: how its probabilities become levels."""

import json
from dataclasses import asdict
from pathlib import Path

from vllm_semantic_sched.policy.facts.decision import DECISION, Decision


def write_decision(model: Path, decision: Decision) -> None:
    """Write the decision to a stored model's `config.json`. What a mistake costs stays with the
    policy."""
    path = model / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings[DECISION] = asdict(decision)
    del settings[DECISION]["missed_cost"]
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
