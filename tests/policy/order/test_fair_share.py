"""Shares of the engine's time by tier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import policy_ref

from vllm_semantic_sched.policy.config.order import FairShareKnobs
from vllm_semantic_sched.policy.config.tiers import Tier, target_shares
from vllm_semantic_sched.policy.order.fair_share import MOST_LEVELS, FairShare

KNOBS = FairShareKnobs(enabled=True)


def tiers(*shares: float | None) -> list[Tier]:
    return [Tier(name=str(place), share=share) for place, share in enumerate(shares)]


def test_tiers_without_a_share_divide_the_rest() -> None:
    assert target_shares(tiers(0.5, None, None)) == [0.5, 0.25, 0.25]
    assert target_shares(tiers(None, None)) == [0.5, 0.5]
    assert target_shares(tiers(1.0, None)) == [1.0, 0.0]


charges = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.0, 5.0), st.floats(0.0, 20.0)), max_size=40
)


@given(charges, st.sets(st.integers(0, 2)))
def test_offsets_are_bounded_and_steer_toward_the_targets(charges, active) -> None:
    share = FairShare(policy_ref(tiers(0.2, 0.3, 0.5), fair_share=KNOBS))
    now, total = 0.0, 0.0
    for level, seconds, pause in charges:
        share.charge(level, seconds)
        total += seconds
        now += pause
        share.update(now, sorted(active))
    assert sum(share.served) == pytest.approx(total)
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


def test_disabled_fair_share_changes_nothing() -> None:
    share = FairShare(policy_ref(tiers(0.5, 0.5)))
    share.charge(0, 8.0)
    share.update(0.0, [0, 1])
    assert share.offsets == [0.0, 0.0]
