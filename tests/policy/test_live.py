"""Policies that change while jobs are queued and running."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import step, take_next

from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.job import LevelSource
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.live import (
    NEEDS_RESTART,
    changed_keys,
    check_live_change,
    fingerprint,
)
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")
BUCKETS = LengthBuckets(edges=(50,), means=(20.0, 400.0))


def policy(**values) -> Policy:
    return parse_policy(values)


def core_of(**values) -> SchedulingCore:
    return SchedulingCore(policy(**values), PROFILE, BUCKETS)


def arrive(core, name, level=None, prediction=None, awaited=False, prompt=10, limit=500):
    hint = Hint(level, LevelSource.DEFAULT if level is None else LevelSource.HINT)
    job = core.arrive(core.draft(name, prompt, limit, hint, awaited or prediction is not None), 0.0)
    core.enqueue(job, core.waiting)
    if prediction is not None:
        core.predicted(job, prediction)
    return job


def settle(core) -> None:
    while core.outdated:
        step(core, lambda job: None, 0.0)


def order(core) -> list[str]:
    return [job.request_id for job in core.waiting.ordered()]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"base": "sjf"}, "base"),
        ({"levels": 4}, "levels"),
        ({"predictor": {"model": "/other"}}, "predictor.model"),
    ],
)
def test_changes_that_need_a_restart_are_rejected_by_name(change, key) -> None:
    with pytest.raises(PolicyError, match=rf"{key}: .* -> .* needs a restart: \w+"):
        check_live_change(policy(), policy(**change))


def test_restart_list_holds_only_keys_and_sections() -> None:
    assert {key.split(".")[0] for key in NEEDS_RESTART} <= set(Policy.model_fields)


def test_changes_are_named_and_change_the_fingerprint() -> None:
    old, new = policy(), policy(preemption={"enabled": False}, default_level=3)
    check_live_change(old, new)
    assert changed_keys(old, new) == ["default_level", "preemption.enabled"]
    assert fingerprint(old, PROFILE) != fingerprint(new, PROFILE)
    assert fingerprint(old, PROFILE) == fingerprint(policy(), PROFILE)
    slower = PROFILE.scaled(2.0, 2.0, 2.0)
    named = policy(profile="default")
    assert fingerprint(named, PROFILE) != fingerprint(named, slower)
    # A derived profile may differ between engines that run one policy.
    assert fingerprint(old, PROFILE) == fingerprint(old, slower)
    assert changed_keys(old, policy()) == []


def test_new_limits_apply_at_once() -> None:
    core = core_of()
    running = arrive(core, "routine", level=4)
    core.waiting.remove(running)
    core.start(running)
    urgent = arrive(core, "urgent", level=1)
    assert core.eviction.worth_preempting(urgent)
    core.switch(policy(preemption={"min_level_gap": 4}), PROFILE)
    assert not core.eviction.worth_preempting(urgent)


def test_predicted_and_default_levels_change_and_hints_stay() -> None:
    core = core_of(decision={"missed_cost": [1.0]})
    costs = Decision()
    prediction = Prediction((0.3, 0.05, 0.05, 0.05, 0.55), (1.0, 0.0), decision=costs)
    predicted = arrive(core, "predicted", prediction=prediction)
    unread = arrive(core, "unread")
    hinted = arrive(core, "hinted", level=3)
    assert order(core) == ["unread", "hinted", "predicted"]
    core.switch(policy(default_level=4, decision={"missed_cost": [12.0, 6.0, 1.0]}), PROFILE)
    settle(core)
    assert (predicted.level, unread.level, hinted.level) == (0, 4, 3)
    assert order(core) == ["predicted", "hinted", "unread"]


def test_running_jobs_with_a_new_order_are_reported() -> None:
    core = core_of()
    job = arrive(core, "a")
    core.waiting.remove(job)
    core.start(job)
    core.switch(policy(default_level=4), PROFILE)
    assert step(core, lambda job: None, 0.0) == [job]
    assert core.running.order(job)[0] == 4


def test_waiting_jobs_with_another_level_are_reported() -> None:
    """Their tier's queue may be full."""
    core = core_of()
    job = arrive(core, "a")
    arrive(core, "hinted", level=4)
    core.switch(policy(default_level=4), PROFILE)
    assert step(core, lambda job: None, 0.0) == [job]


def test_buffer_keeps_arrival_order_after_a_new_default_level() -> None:
    core = core_of()
    arrive(core, "old", awaited=True)
    core.switch(policy(default_level=1), PROFILE)
    arrive(core, "new", awaited=True)
    settle(core)
    assert order(core) == ["old", "new"]
    settle(core)
    assert [take_next(core.waiting).request_id for _ in range(2)] == ["old", "new"]


def test_policy_without_aging_stops_the_timers_of_the_one_before() -> None:
    aging, none = policy(aging={"enabled": True, "interval": 10.0}), policy()
    core = core_of(aging={"enabled": True, "interval": 10.0})
    ended, waiting = arrive(core, "ended", 3), arrive(core, "waiting", 3)
    core.switch(none, core.profile)
    core.finish(ended, AnswerEnd.ABORTED)
    assert not core.seating.may_move(1000.0)
    settle(core)
    core.switch(aging, core.profile)
    settle(core)
    assert core.seating.step(1000.0, lambda job: None) == [waiting]


def test_each_step_reranks_a_bounded_number_of_jobs() -> None:
    core = core_of()
    for number in range(2000):
        arrive(core, str(number), level=number % 5)
    core.switch(policy(decision={"missed_cost": [2.0]}), PROFILE)
    sizes = []
    while core.outdated:
        before = len(core.outdated)
        step(core, lambda job: None, 0.0)
        sizes.append(before - len(core.outdated))
    assert max(sizes) <= 100 and len(sizes) == 20


events = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 5), st.integers(1, 400)),
        st.tuples(st.just("start"), st.just(0), st.just(0)),
        st.tuples(st.just("preempt"), st.just(0), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("adopt"), st.integers(0, 4), st.integers(1, 400)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(events)
def test_order_follows_the_policy_in_force_after_any_changes(events) -> None:
    core = core_of()
    jobs = []
    for number, (kind, a, b) in enumerate(events):
        if kind == "arrive":
            jobs.append(arrive(core, str(number), level=a if a < 5 else None, prompt=b))
        elif kind == "start" and core.waiting:
            core.start(take_next(core.waiting))
        elif kind == "preempt" and len(core.running):
            victim = core.running.least_urgent()
            core.preempt(victim, core.plan_preemption(victim, victim.computed))
            core.requeue(victim, core.waiting)
        elif kind == "finish" and jobs:
            core.finish(jobs.pop(a % len(jobs)), AnswerEnd.ABORTED)
        elif kind == "adopt":
            core.switch(policy(default_level=a, decision={"missed_cost": [float(b)]}), PROFILE)
        elif kind == "step":
            step(core, lambda job: None, 0.0)
    settle(core)
    waiting = [job for job in jobs if job in core.waiting]
    assert order(core) == [job.request_id for job in sorted(waiting, key=core.rank)]
    assert len(core.waiting) + len(core.running) == len(jobs)
