"""Every policy key is put to use: something that ships sets it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.section import keys_of

CONFIGS = Path(__file__).parents[3] / "configs"

# Sections that depend on where a server runs or on a predictor of one's own.
ELSEWHERE = {
    "correct_profile": "off where a run must repeat: scripts/studies/validation.py",
    "decision": "fits a model's probabilities to levels: `semsched train`",
    "events": "a path on the server: docs/operations.md",
    "hints": "who may claim urgency: docs/getting-started.md",
    "length": "fits a model's lengths: scripts/studies/order.py",
    "observe": "set by `semsched serve --observe`, as in configs/deploy/kubernetes/observe",
    "placement": "several engines: docs/several-engines.md",
    "predictor": "another model or machine: docs/predictor.md",
    "profile": "a profile of one's own: `semsched profile`",
    "retention.survival": "depends on the prefixes that requests share: docs/preemption.md",
}


def leaves(keys: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of the keys below `path`; sweeps of scenarios name theirs with dots."""
    if isinstance(keys, dict):
        for name, value in keys.items():
            yield from leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(keys, list) and keys and isinstance(keys[0], dict):
        for item in keys:
            yield from leaves(item, f"{path}[]")
    else:
        yield path, keys


def used_keys() -> Iterator[tuple[str, Any]]:
    policies = [*CONFIGS.glob("policies/*.yaml"), CONFIGS / "deploy/kubernetes/base/policy.yaml"]
    for file in policies:
        yield from leaves(yaml.safe_load(file.read_text()) or {})
    for file in CONFIGS.glob("scenarios/*.yaml"):
        scenario = yaml.safe_load(file.read_text())
        for keys in (scenario.get("overrides", {}), *scenario["schedulers"].values()):
            yield from leaves(keys)
        for name, values in leaves(scenario.get("sweep", [])):
            for value in values:
                yield name.removeprefix("[].overrides."), value


def is_elsewhere(name: str) -> bool:
    return any(f"{name}.".startswith(f"{key}.") for key in ELSEWHERE)


def test_every_key_is_set_by_a_policy_scenario_or_manifest() -> None:
    known = {key.name: key for key in keys_of(Policy)}
    groups = {name for name in known if any(other.startswith(f"{name}.") for other in known)}
    groups |= {"tiers"}
    used = {name for name, value in used_keys() if name in known and value != known[name].default}
    unused = [name for name in known.keys() - groups - used if not is_elsewhere(name)]
    assert not unused, "make it a constant, or ship something that needs it"
    stale = [
        key for key in ELSEWHERE if not any(f"{name}.".startswith(f"{key}.") for name in known)
    ]
    assert not stale
