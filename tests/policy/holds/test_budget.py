"""Who is held beside protected jobs, and what it may cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job, policy_of, policy_ref

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import Protect
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import LevelSource
from vllm_semantic_sched.policy.holds.budget import WINDOW, Budget, Protection
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile
from vllm_semantic_sched.policy.retention import HostRoom

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


def decoding(name: str, level: int, context: int = 10):
    job = make_job(level, request_id=name, prompt_tokens=context)
    job.computed = context
    return job


def choose(
    protection: Protection, urgent: int, levels, waiting: float = 0.0, profile=PROFILE, context=10
):
    """Those held beside `urgent` level-0 decodes, of others of these levels and context."""
    others = [decoding(f"o{n}", level, context) for n, level in enumerate(levels)]
    losing = urgent * WORTH[0] + sum(WORTH[level] for level in levels) + waiting
    certain = Batch(decodes=urgent, context=10 * urgent)
    return protection.choose(certain, others, WORTH, urgent * WORTH[0], losing, profile)


def test_everybody_is_held_where_nobody_loses_much() -> None:
    """One of 16 requests gains 15 ms, and all lose 10 ms less what its token costs in a full step:
    11 - 26 / 16 = 9.4 ms."""
    protection = Protection(policy_ref(protect=Protect(level=0)))
    assert len(choose(protection, urgent=1, levels=[4] * 15)) == 15
    assert protection.budget.recent == pytest.approx(0.011 - 0.026 / 16)
    assert (protection.steps, protection.tokens_forgone) == (1, 15)


def test_nobody_is_held_under_a_queue_that_loses_more() -> None:
    protection = Protection(policy_ref(protect=Protect(level=0)))
    assert choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    assert not choose(protection, urgent=1, levels=[4] * 15, waiting=60)
    assert choose(protection, urgent=4, levels=[4] * 15, waiting=60)


def test_more_urgent_others_run_beside() -> None:
    held = choose(
        Protection(policy_ref(protect=Protect(level=0))),
        urgent=1,
        levels=[1] * 7 + [4] * 8,
        waiting=30,
    )
    assert [job.level for job in held] == [4] * 8


def test_required_worth_grows_as_budget_shrinks() -> None:
    protection = Protection(policy_ref(protect=Protect(level=0)))
    assert choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    protection.budget.spend(0.9 * protection.budget.total)
    assert not choose(protection, urgent=1, levels=[4] * 15, waiting=20)
    assert not choose(protection, urgent=9, levels=[4] * 90)


def test_a_step_that_costs_more_than_is_left_is_not_held() -> None:
    protection = Protection(policy_ref(protect=Protect(level=0)))
    protection.budget.spend(protection.budget.total - 0.001)
    assert not choose(protection, urgent=50, levels=[4] * 50)


@pytest.mark.parametrize("context", [10, 5000, 50_000])
def test_long_context_makes_holds_gain_more_and_cost_the_same(context) -> None:
    """A later step has to read it: what is lost is the fixed time alone."""
    terms = PROFILE.batch_terms.model_copy(update={"per_context_token": 1e-6})
    protection = Protection(policy_ref(protect=Protect(level=0)))
    profile = PROFILE.model_copy(update={"batch": terms})
    assert len(choose(protection, 1, [4] * 15, profile=profile, context=context)) == 15
    assert protection.budget.recent == pytest.approx(0.011 - 0.026 / 16)


def test_nobody_is_held_while_the_profile_is_uncertain() -> None:
    certain = False
    protection = Protection(policy_ref(protect=Protect(level=0)), lambda: certain)
    assert not protection.begin_step(0.0, busy=True)
    certain = True
    assert protection.begin_step(0.01, busy=True)


def test_preemptions_for_urgent_jobs_use_up_the_budget() -> None:
    ref = policy_ref(protect=Protect(level=0))
    protection = Protection(ref)
    assert protection.begin_step(0.0, busy=True)
    protection.budget.spend(0.1 * protection.budget.total)
    protection.spend(protection.budget.total)
    assert not protection.begin_step(0.01, busy=True)
    assert not choose(protection, urgent=1, levels=[4] * 15)
    # What holds cost is told apart.
    assert protection.budget.share == pytest.approx(0.1 * ref.policy.protect.price)
    protection.begin_step(1.1 * WINDOW, busy=True)
    assert protection.budget.left == pytest.approx(protection.budget.total)
    assert protection.budget.share == 0.0


def test_preemptions_cost_nothing_where_nobody_is_protected() -> None:
    protection = Protection(policy_ref(protect=Protect()))
    protection.spend(10.0)
    assert protection.budget.recent == 0.0


@pytest.mark.parametrize(
    ("reason", "host", "charged"),
    [("urgent", None, 1.0), ("kv_shortage", None, 0.0), ("urgent", HostRoom(16, 1000), 0.002)],
)
def test_core_charges_what_an_urgent_preemption_computes_again(reason, host, charged) -> None:
    policy = parse_policy({"predictor": {"enabled": False}, "protect": {"level": 0}})
    core = SchedulingCore(policy, PROFILE)
    core.set_capacity(EngineCapacity(4, 1000, 16))
    hint = Hint(4, LevelSource.HINT)
    job = core.arrive(core.draft("r", 1000, 100, hint, awaits_prediction=False), 0.0)
    core.enqueue(job, core.waiting)
    core.take(job, core.waiting)
    core.start(job)
    job.computed = 1000
    core.preempt(job, core.plan_preemption(job, job.computed, host), reason)
    assert core.protection.budget.recent == pytest.approx(charged)


def test_core_pauses_holds_until_steps_agree_with_the_profile() -> None:
    policy = parse_policy({"predictor": {"enabled": False}, "protect": {"level": 0}})
    core, batch = SchedulingCore(policy, PROFILE), Batch(decodes=4)
    assert core.protection.begin_step(0.0, busy=True)
    core.estimates.observe_step(batch, 3 * PROFILE.step(batch))
    assert not core.protection.begin_step(0.1, busy=True)
    for _ in range(100):
        core.estimates.observe_step(batch, 3 * PROFILE.step(batch))
    assert core.protection.begin_step(0.2, busy=True)


def test_only_own_level_protects_and_aged_are_not_held() -> None:
    protection = Protection(policy_ref(protect=Protect(level=1)))
    aged = make_job(3, request_id="aged")
    aged.gain().waiting = 2.0
    assert not protection.protects(aged)
    assert aged.effective_level <= protection.protects_at
    assert protection.protects(make_job(1, request_id="urgent"))


@pytest.mark.parametrize("knobs", [Protect(), Protect(level=0, price=0.0)])
def test_off_without_a_level_or_a_price(knobs) -> None:
    assert not Protection(policy_ref(protect=knobs)).enabled


def test_a_step_without_tokens_is_followed_by_one_without_holds() -> None:
    protection = Protection(policy_ref(protect=Protect(level=0)))
    assert protection.begin_step(0.0, busy=False)
    protection.held[make_job(3, request_id="held")] = None
    protection.achieved_nothing()
    assert not protection.begin_step(0.001, busy=True)
    assert protection.begin_step(0.002, busy=True)


def test_idle_time_earns_nothing() -> None:
    protection = Protection(policy_ref(protect=Protect(level=0)))
    protection.begin_step(0.0, busy=False)
    protection.budget.spend(protection.budget.total)
    assert not protection.begin_step(10 * WINDOW, busy=False)
    assert protection.begin_step(11.1 * WINDOW, busy=True)


def test_another_price_counts_what_was_spent_before() -> None:
    ref = policy_ref(protect=Protect(level=0, price=0.1))
    protection = Protection(ref)
    protection.budget.spend(0.04 * WINDOW)
    ref.switch(policy_of(protect=Protect(level=0, price=0.05)))
    assert protection.budget.left == pytest.approx(0.01 * WINDOW)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 9.0), st.floats(0.0, 2.0)), min_size=1, max_size=150),
    st.floats(0.01, 0.5),
)
def test_the_loss_in_any_window_stays_within_the_price(steps, price) -> None:
    """Steps of some seconds, each of which wants to lose some."""
    budget = Budget(policy_ref(protect=Protect(level=0, price=price)))
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
