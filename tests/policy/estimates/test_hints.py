"""Untrusted hints of any type and value."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.estimates.decision import read_hints
from vllm_semantic_sched.policy.facts.job import LevelSource

DEFAULT = parse_policy({})
TIERS = parse_policy(
    {
        "levels": 3,
        "default_level": 1,
        "tiers": [
            {"name": "first", "service_tier": "priority"},
            {"name": "second", "service_tier": "default"},
            {"name": "third", "service_tier": "flex"},
        ],
    }
)
VLLM = parse_policy({"hints": {"priority": "vllm"}})
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(anything, anything)
def test_hints_never_raise_or_leave_the_range(urgency, priority) -> None:
    for extra_args in (urgency, {"urgency": urgency}):
        for hints in (DEFAULT.hints, VLLM.hints):
            hint = read_hints(extra_args, priority, hints, DEFAULT.levels, DEFAULT.default_level)
            assert hint.level is None or 0 <= hint.level < DEFAULT.levels


@pytest.mark.parametrize("urgency", ["abc", 99, -1, None, {"a": 1}, [0], True, 1.5, math.nan, "٣"])
def test_invalid_level_is_reported_and_ignored(urgency) -> None:
    hint = read_hints({"urgency": urgency}, 0, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level)
    assert hint.level is None and hint.source is LevelSource.DEFAULT
    assert hint.problem is not None and "0 to 4" in hint.problem and len(hint.problem) < 150


@pytest.mark.parametrize("urgency", [0, 3, 3.0, "3"])
def test_valid_level_is_used(urgency) -> None:
    hint = read_hints({"urgency": urgency}, 7, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level)
    assert (hint.level, hint.source, hint.problem) == (int(urgency), LevelSource.HINT, None)


def test_nonzero_priority_counts_without_an_urgency_hint() -> None:
    assert read_hints(None, 0, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level).level is None
    assert read_hints(None, 1, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level).level == 1
    assert read_hints(None, 1000, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level).level == 4
    assert read_hints(None, -5, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level).level == 0
    assert (
        read_hints(
            {"urgency": "abc"}, 3, DEFAULT.hints, DEFAULT.levels, DEFAULT.default_level
        ).level
        == 3
    )


@pytest.mark.parametrize(
    ("priority", "level"),
    [(-1000, 0), (-2, 0), (-1, 1), (0, None), (1, 3), (2, 4), (10, 4)],
)
def test_priority_can_keep_the_meaning_that_vllm_gives_it(priority, level) -> None:
    assert read_hints(None, priority, VLLM.hints, VLLM.levels, VLLM.default_level).level == level


def test_policy_can_cap_or_ignore_hints() -> None:
    cap = parse_policy({"hints": {"urgency": "cap", "priority": "cap", "most_urgent_level": 2}})
    assert read_hints({"urgency": 0}, 0, cap.hints, cap.levels, cap.default_level).level == 2
    assert read_hints({"urgency": 3}, 0, cap.hints, cap.levels, cap.default_level).level == 3
    assert read_hints(None, -1, cap.hints, cap.levels, cap.default_level).level == 2
    ignore = parse_policy({"hints": {"urgency": "ignore", "priority": "ignore"}})
    assert (
        read_hints({"urgency": 0}, 1, ignore.hints, ignore.levels, ignore.default_level).level
        is None
    )
    assert (
        read_hints({"urgency": "abc"}, 0, ignore.hints, ignore.levels, ignore.default_level).problem
        is None
    )


DISPATCH = TIERS.model_copy(
    update={
        "hints": parse_policy(
            {
                "hints": {
                    "urgency": "cap",
                    "priority": "cap",
                    "most_urgent_level": 1,
                    "most_urgent_level_of": {"cad": 0, "batch": 2},
                }
            }
        ).hints
    }
)


@pytest.mark.parametrize(("tenant", "level"), [("cad", 0), ("batch", 2), ("CAD", 1), ("", 1)])
@pytest.mark.parametrize(
    ("extra_args", "priority"), [({"urgency": 0}, 0), ({}, -1), ({"service_tier": "priority"}, 0)]
)
def test_tenant_can_have_its_own_most_urgent_level(tenant, level, extra_args, priority) -> None:
    hint = read_tier(extra_args, priority, DISPATCH, tenant)
    assert hint.level == level
    less_urgent = read_tier({"urgency": 2}, 0, DISPATCH, tenant)
    assert less_urgent.level == 2, "a limit raises nothing"


def read_tier(extra_args, priority=0, policy=TIERS, tenant=""):
    return read_hints(
        extra_args,
        priority,
        policy.hints,
        policy.levels,
        policy.default_level,
        policy.service_tiers,
        tenant,
    )


@pytest.mark.parametrize(
    ("service_tier", "level"),
    [("priority", 0), ("default", 1), ("auto", 1), ("flex", 2)],
)
def test_service_tier_of_a_policy_is_a_hint(service_tier, level) -> None:
    hint = read_tier({"service_tier": service_tier})
    assert (hint.level, hint.source) == (level, LevelSource.SERVICE_TIER)


@given(anything)
def test_service_tier_that_no_tier_has_says_nothing(sent) -> None:
    for policy, service_tier in ((TIERS, sent), (DEFAULT, "flex")):
        hint = read_tier({"service_tier": service_tier}, policy=policy)
        assert (hint.level, hint.source) == (None, LevelSource.DEFAULT)


def test_stated_level_is_more_than_a_service_tier() -> None:
    assert read_tier({"service_tier": "flex", "urgency": 0}).source is LevelSource.HINT
    assert read_tier({"service_tier": "flex"}, priority=1).source is LevelSource.PRIORITY
    wrong = read_tier({"service_tier": "flex", "urgency": 99})
    assert wrong.level == 2 and wrong.problem is not None


def test_two_tiers_cannot_have_the_same_service_tier() -> None:
    tiers = [{"name": name, "service_tier": "flex"} for name in "ab"]
    with pytest.raises(PolicyError, match="service_tier: flex occurs twice"):
        parse_policy({"levels": 2, "default_level": 1, "tiers": tiers})
