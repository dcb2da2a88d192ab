"""Who is held beside protected jobs, and what it may cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import Protect
from vllm_semantic_sched.policy.order.protection import WINDOW, Budget, Protection
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile

PROFILE = EngineProfile(
    hardware="",
    model="",
    source="",
    alpha1=0.0,
    alpha2=0.001,
    beta_load=1e-6,
    beta_save=1e-6,
    gamma1=0.0,
    gamma2=0.010,
    batch=BatchTerms(step=0.010, per_sequence=0.001),
)
"""A step takes 10 ms, and 1 ms more for each sequence."""

WORTH = (72.0, 6.0, 1.0, 1.0, 1.0)


def decoding(name: str, level: int):
    job = make_job(level, request_id=name, prompt_tokens=10)
    job.computed = 10
    return job


def choose(protection: Protection, urgent: int, levels, waiting: float = 0.0):
    """Those held beside `urgent` level-0 decodes, of others of these levels."""
    others = [decoding(f"o{n}", level) for n, level in enumerate(levels)]
    losing = urgent * WORTH[0] + sum(WORTH[level] for level in levels) + waiting
    certain = Batch(decodes=urgent, context=10 * urgent)
    return protection.choose(certain, others, WORTH, urgent * WORTH[0], losing, PROFILE)


def test_everybody_is_held_where_nobody_loses_much() -> None:
    """One of 16 requests gains 15 ms, and all lose 10 ms less what its token costs in a full step:
    11 - 26 / 16 = 9.4 ms."""
    protection = Protection(Protect(level=0))
    assert len(choose(protection, urgent=1, levels=[4] * 15)) == 15
    assert protection.budget.recent == pytest.approx(0.011 - 0.026 / 16)
    assert (protection.steps, protection.tokens_forgone) == (1, 15)


def test_nobody_is_held_under_a_queue_that_loses_more() -> None:
    protection = Protection(Protect(level=0))
    assert choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    assert not choose(protection, urgent=1, levels=[4] * 15, waiting=60)
    assert choose(protection, urgent=4, levels=[4] * 15, waiting=60)


def test_more_urgent_others_run_beside() -> None:
    held = choose(Protection(Protect(level=0)), urgent=1, levels=[1] * 7 + [4] * 8, waiting=30)
    assert [job.level for job in held] == [4] * 8


def test_the_less_of_the_budget_is_left_the_more_a_step_must_be_worth() -> None:
    protection = Protection(Protect(level=0))
    assert choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    protection.budget.spend(0.9 * protection.budget.total)
    assert not choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    assert not choose(protection, urgent=9, levels=[4] * 90)


def test_a_step_that_costs_more_than_is_left_is_not_held() -> None:
    protection = Protection(Protect(level=0))
    protection.budget.spend(protection.budget.total - 0.001)
    assert not choose(protection, urgent=50, levels=[4] * 50)


def test_only_the_own_level_protects_and_age_keeps_from_being_held() -> None:
    protection = Protection(Protect(level=1))
    aged = make_job(3, request_id="aged")
    aged.aged = 2.0
    assert not protection.protects(aged) and not protection.yields(aged)
    assert protection.protects(make_job(1, request_id="urgent"))


@pytest.mark.parametrize("knobs", [Protect(), Protect(level=0, price=0.0)])
def test_off_without_a_level_or_a_price(knobs) -> None:
    assert not Protection(knobs).enabled


def test_a_step_without_tokens_is_followed_by_one_without_holds() -> None:
    protection = Protection(Protect(level=0))
    assert protection.begin_step(0.0, busy=False)
    protection.held[make_job(3, request_id="held")] = None
    protection.achieved_nothing()
    assert not protection.begin_step(0.001, busy=True)
    assert protection.begin_step(0.002, busy=True)


def test_idle_time_earns_nothing() -> None:
    protection = Protection(Protect(level=0))
    protection.begin_step(0.0, busy=False)
    protection.budget.spend(protection.budget.total)
    assert not protection.begin_step(10 * WINDOW, busy=False)
    assert protection.begin_step(11.1 * WINDOW, busy=True)


def test_another_price_counts_what_was_spent_before() -> None:
    protection = Protection(Protect(level=0, price=0.1))
    protection.budget.spend(0.04 * WINDOW)
    protection.adopt(parse_policy({"protect": {"level": 0, "price": 0.05}}).protect)
    assert protection.budget.left == pytest.approx(0.01 * WINDOW)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 9.0), st.floats(0.0, 2.0)), min_size=1, max_size=150),
    st.floats(0.01, 0.5),
)
def test_the_loss_in_any_window_stays_within_the_price(steps, price) -> None:
    """Steps of some seconds, each of which wants to lose some."""
    budget = Budget(price)
    times, losses = [], []
    for seconds, wanted in steps:
        loss = wanted if wanted <= budget.left else 0.0
        if loss:
            budget.spend(loss)
        times.append(budget.worked)
        losses.append(loss)
        budget.work(seconds)
    for first in range(len(times)):
        within = sum(
            loss
            for time, loss in zip(times[first:], losses[first:], strict=True)
            if time < times[first] + WINDOW
        )
        assert within <= price * WINDOW + 1e-6
