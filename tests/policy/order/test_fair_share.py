"""Shares of the engine's time by tier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, policy_of, policy_ref, step

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.order import FairShareKnobs
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.order.fair_share import MOST_LEVELS, FairShare, shares_of
from vllm_semantic_sched.policy.profile.formula import load_profile

KNOBS = FairShareKnobs(enabled=True)


def tiers(*shares: float | None) -> list[Tier]:
    return [Tier(name=str(place), share=share) for place, share in enumerate(shares)]


def test_tiers_without_a_share_divide_the_rest() -> None:
    assert policy_of(tiers(0.5, None, None)).target_shares == (0.5, 0.25, 0.25)
    assert policy_of(tiers(None, None)).target_shares == (0.5, 0.5)
    assert policy_of(tiers(1.0, None)).target_shares == (1.0, 0.0)
    assert Policy(levels=4).target_shares == (0.25,) * 4


def test_what_the_others_are_due_goes_to_those_that_ask() -> None:
    targets = (0.5, 0.3, 0.2, 0.0)
    assert shares_of((1.0, 3.0, 5.0, 0.0), targets, [0, 1]) == {
        0: (0.25, pytest.approx(0.625)),
        1: (0.75, pytest.approx(0.375)),
    }
    assert shares_of((0.0, 0.0, 5.0, 0.0), targets, [0, 1]) == {}
    assert shares_of((0.0, 0.0, 5.0, 2.0), targets, [3]) == {}  # alone, it takes from nobody
    assert shares_of((0.0, 0.0, 6.0, 2.0), targets, [2, 3]) == {2: (0.75, 1.0), 3: (0.25, 0.0)}


charges = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.0, 5.0), st.floats(0.0, 20.0)), max_size=40
)


@given(charges, st.sets(st.integers(0, 2)))
def test_offsets_are_bounded_and_steer_toward_the_targets(charges, active) -> None:
    share = FairShare(policy_ref(tiers(0.2, 0.3, 0.5), fair_share=KNOBS))
    now = 0.0
    for level, seconds, pause in charges:
        share.charge(level, seconds)
        now += pause
        share.update(now, sorted(active))
    found = share.shares(sorted(active))
    if charges and found:
        assert sum(used for used, _ in found.values()) == pytest.approx(1.0)
        assert sum(target for _, target in found.values()) == pytest.approx(1.0)
        for level, (used, target) in found.items():
            offset = share.offsets[level]
            assert abs(offset) <= MOST_LEVELS
            assert offset == 0 or (offset > 0) == (used > target)
            if abs(used - target) >= 0.1 * target * (1 + 1e-9):
                assert abs(offset) == pytest.approx(MOST_LEVELS)
    for level in {0, 1, 2} - active:
        assert share.offsets[level] == 0


def test_use_decays_and_unused_shares_are_divided() -> None:
    share = FairShare(policy_ref(tiers(0.5, 0.25, 0.25), fair_share=KNOBS))
    share.charge(0, 8.0)
    share.charge(1, 1.0)
    share.charge(2, 1.0)
    share.update(0.0, [0, 1])
    assert share.offsets[0] > 0 > share.offsets[1] and share.offsets[2] == 0
    share.update(0.0, [1, 2])  # alone among themselves they are even
    assert share.offsets == pytest.approx([0.0, 0.0, 0.0])
    share.update(200.0, [0, 1, 2])
    share.charge(1, 1.0)
    share.update(200.0, [0, 1, 2])
    assert share.offsets[1] == MOST_LEVELS and share.offsets[0] == -MOST_LEVELS


@pytest.mark.parametrize("enabled", [False, True])
def test_offsets_follow_from_what_jobs_use_only_with_fair_shares(enabled) -> None:
    policy = policy_of(tiers(0.5, 0.5), fair_share=FairShareKnobs(enabled=enabled))
    core = SchedulingCore(policy, load_profile("default"))
    for level in (0, 0, 1):
        core.enqueue(make_job(level), core.waiting)
    core.take(core.waiting.peek(), core.waiting)
    step(core)
    expected = [MOST_LEVELS, -MOST_LEVELS] if enabled else [0.0, 0.0]
    assert core.seating.fair_share.offsets == expected
