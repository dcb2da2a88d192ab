"""Untrusted hints of any type and value."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.estimates.decision import read_hints
from vllm_semantic_sched.policy.facts.job import LevelSource

DEFAULT = parse_policy({})
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
