"""Removed keys are refused with what takes their place."""

import re

import pytest

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.config.removed import REMOVED
from vllm_semantic_sched.policy.config.section import PolicyError, keys_of
from vllm_semantic_sched.sim.sections import Settings


def nested(key: str) -> dict:
    """A policy file with this key."""
    first, _, rest = key.partition(".")
    return {first: nested(rest) if rest else 1}


@pytest.mark.parametrize("key", REMOVED)
def test_removed_key_gives_its_sentence(key) -> None:
    with pytest.raises(PolicyError) as refusal:
        parse_policy(nested(key), "my.yaml")
    assert str(refusal.value) == f"my.yaml: {key} was removed: {REMOVED[key]}"


@pytest.mark.parametrize("key", REMOVED)
def test_what_takes_its_place_exists_and_it_does_not(key) -> None:
    policy, scenario = ({one.name for one in keys_of(model)} for model in (Policy, Settings))
    assert key not in policy
    for before, name in re.findall(r"(scenario key )?`([^`]+)`", REMOVED[key]):
        if "." in name or "[" in name:
            assert name in (scenario if before else policy), name
        elif name.startswith("semsched "):
            with pytest.raises(SystemExit) as end:
                main([*name.split()[1:], "--help"])
            assert end.value.code == 0, name


def test_removed_and_unknown_keys_are_reported_together() -> None:
    data = {"stage": {"mode": "gate"}, "aging": {"cap": 3, "enabld": True}, "bse": "sjf"}
    with pytest.raises(PolicyError) as refusal:
        parse_policy(data)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 4
    for word in ("stage.mode was removed", "aging.cap was removed", "aging.enabld", "bse"):
        assert any(word in line for line in lines), word


def test_keys_that_were_groups_name_their_new_value() -> None:
    data = {
        "dedup": {"enabled": True, "running": "end"},
        "predictor": {"instant": {"may": "start"}},
    }
    with pytest.raises(PolicyError) as refusal:
        parse_policy(data)
    assert [line.split(" was removed")[0] for line in str(refusal.value).splitlines()] == [
        "policy: dedup.enabled",
        "policy: dedup.running",
        "policy: predictor.instant.may",
    ]
