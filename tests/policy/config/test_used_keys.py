"""Every policy key has a user, and is set by something that ships or has a test of its effect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from reference import users

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.section import keys_of

CONFIGS = Path(__file__).parents[3] / "configs"


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


def keys() -> dict[str, str]:
    """The default of each key that is not a group."""
    known = {key.name: key for key in keys_of(Policy)}
    groups = {name for name in known if any(other.startswith(f"{name}.") for other in known)}
    return {name: key.default for name, key in known.items() if name not in groups | {"tiers"}}


def test_every_key_has_its_user() -> None:
    assert users().keys() == keys().keys()


def test_every_key_is_set_by_something_that_ships_or_has_a_test() -> None:
    known = keys()
    used = {name for name, value in used_keys() if name in known and value != known[name]}
    tested = {name for name, user in users().items() if user.test is not None}
    assert known.keys() - used - tested == set(), "make it a constant, or test what it is for"


@pytest.mark.parametrize("key", [name for name, user in users().items() if user.test])
def test_tests_of_keys_exist(key) -> None:
    file, _, name = str(users()[key].test).partition("::")
    assert f"def {name}(" in (CONFIGS.parent / file).read_text()
