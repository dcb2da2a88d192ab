"""Shedding: lowest first, never the top tier, recovers by itself."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import policy_of, policy_ref

from vllm_semantic_sched.policy.config.overload import Shedding
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.overload.load import ESCALATE, RECOVER, Shedder

RULES = Shedding(enabled=True)  # recovers after 2 s
TIERS = (
    Tier(name="system"),
    Tier(name="premium"),
    Tier(name="standard", shed_order=7),
    Tier(name="background", shed_order=2),
)


def shed(shedder: Shedder) -> list[str]:
    return [tier.name for tier in TIERS if shedder.is_shed(tier)]


def observe(shedder: Shedder, now: float, broken: bool, calm: bool = False) -> list[str]:
    shedder.observe(broken, calm, now)
    return shed(shedder)


def test_tiers_are_shed_one_by_one_in_shed_order() -> None:
    shedder = Shedder(policy_ref(TIERS, shedding=RULES))
    assert observe(shedder, 0.0, broken=True) == ["background"]
    assert observe(shedder, 0.9, broken=True) == ["background"]
    assert observe(shedder, 1.0, broken=True) == ["standard", "background"]
    assert observe(shedder, 99.0, broken=True) == ["standard", "background"]


def test_shed_tiers_return_in_reverse_order_after_recover() -> None:
    shedder = Shedder(policy_ref(TIERS, shedding=RULES))
    observe(shedder, 0.0, broken=True)
    observe(shedder, 1.0, broken=True)
    assert observe(shedder, 2.0, broken=False) == ["standard", "background"]
    assert observe(shedder, 3.9, broken=False) == ["standard", "background"]
    assert observe(shedder, 4.0, broken=False) == ["background"]
    observe(shedder, 4.1, broken=False)
    assert observe(shedder, 6.1, broken=False) == []


def test_early_recovery_doubles_the_next_wait() -> None:
    shedder = Shedder(policy_ref(TIERS, shedding=RULES))
    observe(shedder, 0.0, broken=True)
    observe(shedder, 0.1, broken=False)
    assert observe(shedder, 2.1, broken=False) == []
    assert observe(shedder, 3.2, broken=True) == ["background"]
    observe(shedder, 3.3, broken=False)
    assert observe(shedder, 5.4, broken=False) == ["background"]  # 2 s were too few
    assert observe(shedder, 7.4, broken=False) == []


def test_calm_engine_serves_all_tiers_again() -> None:
    shedder = Shedder(policy_ref(TIERS, shedding=RULES))
    for now in range(5):
        observe(shedder, float(now), broken=True)
    observe(shedder, 5.0, broken=False, calm=True)
    assert observe(shedder, 7.0, broken=False, calm=True) == []


def test_only_tiers_that_stay_benefit() -> None:
    shedder = Shedder(policy_ref(TIERS, shedding=RULES))
    assert [tier.name for tier in TIERS if shedder.benefits(tier)] == [
        "system",
        "premium",
        "standard",
    ]


def test_switching_off_ends_shedding() -> None:
    ref = policy_ref(TIERS, shedding=RULES)
    shedder = Shedder(ref)
    observe(shedder, 0.0, broken=True)
    ref.switch(policy_of(TIERS))
    shedder.observe(True, False, 1.0)
    assert shed(shedder) == []


@given(st.lists(st.tuples(st.floats(0.05, 1.5), st.booleans(), st.booleans()), max_size=100))
def test_shedding_changes_by_one_step_with_pauses_and_recovers(steps) -> None:
    shedder, now, last_rise = Shedder(policy_ref(TIERS, shedding=RULES)), 0.0, float("-inf")
    for pause, broken, calm in steps:
        now += pause
        before = shedder.stage
        observe(shedder, now, broken, calm)
        assert "system" not in shed(shedder) and "premium" not in shed(shedder)
        if shedder.stage > before:
            assert shedder.stage == before + 1 and broken
            assert now - last_rise >= ESCALATE
            last_rise = now
        elif shedder.stage < before and not calm:
            assert shedder.stage == before - 1 and not broken
            assert now - last_rise >= RECOVER
    for _ in range(400):  # 8 times patience for each of two tiers
        now += 0.1
        observe(shedder, now, broken=False)
    assert shedder.stage == 0
