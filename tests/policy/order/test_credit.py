"""Levels gained by waiting and by a deadline, and limits on overtaking."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, policy_ref, step
from tiers import seconds_to_overdue, wait_bound

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import Aging, Deadlines
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.job import LevelSource
from vllm_semantic_sched.policy.order.credit import SHARE, CreditTimers, Overtaking
from vllm_semantic_sched.policy.profile.formula import load_profile

knobs = st.builds(
    Aging,
    enabled=st.just(True),
    interval=st.sampled_from([0.1, 1.0, 7.0]),
)


@given(knobs, st.integers(0, 4), st.lists(st.floats(0.001, 5.0), max_size=60))
def test_waiting_promotes_a_job_by_steps_until_it_is_overdue(knobs, level, pauses) -> None:
    timers, job, now = CreditTimers(policy_ref(aging=knobs)), make_job(level), 0.0
    timers.wait(job, Slo())
    for pause in pauses:
        now += pause
        timers.expire(now)
        earned = {int((now + rounding) / knobs.interval) for rounding in (-1e-6, 1e-6)}
        assert job.effective_level in {max(level - count, -1) for count in earned}
    seconds = seconds_to_overdue(knobs, level)
    assert not job.overdue or (seconds is not None and now >= seconds - 1e-6)
    assert job.overdue or seconds is None or now <= seconds + 1e-6


def test_promotions_fire_once_and_exclude_time_in_a_seat() -> None:
    timers = CreditTimers(policy_ref(aging=Aging(enabled=True, interval=10.0)))
    job = make_job(3)
    timers.wait(job, Slo())
    assert timers.expire(9.9) == [] and timers.expire(10.0) == [job]
    assert timers.expire(10.0) == [] and job.effective_level == 2
    timers.stop(job)
    assert timers.expire(500.0) == []
    job.waited, job.entered = 15.0, 500.0  # as the lifecycle keeps them
    timers.wait(job, Slo())
    assert timers.expire(504.9) == [] and timers.expire(505.0) == [job]
    assert (job.effective_level, timers.promotions) == (1, 2)
    assert timers.expire(1000.0) == [job] and timers.expire(9999.0) == []
    assert job.overdue and timers.promotions == 4


def test_one_timer_fires_for_the_promotion_and_for_the_deadline() -> None:
    aging, deadlines = Aging(enabled=True, interval=2.0), Deadlines(enabled=True)
    timers, job = CreditTimers(policy_ref(aging=aging, deadlines=deadlines)), make_job(2)
    timers.wait(job, Slo(ttft=3.0))
    assert timers.expire(0.0) == [job] and job.effective_level == 1.5
    assert timers.expire(1.9) == [] and timers.expire(2.0) == [job]
    assert job.effective_level == 1  # the larger gain counts
    assert timers.expire(3.0) == [job] and job.effective_level == 1  # past its deadline
    assert (timers.promotions, timers.deadline_boosted, job.credit.deadline) == (1, 1, 0.0)
    timers.stop(job)
    assert timers.expire(1000.0) == []


@given(st.lists(st.booleans(), max_size=300))
def test_overtakings_are_a_share_of_the_admissions(wishes) -> None:
    overtaking = Overtaking()
    for admissions, wish in enumerate(wishes, start=1):
        overtaking.admitted(wish and overtaking.allowed)
        assert overtaking.count <= 1 + SHARE * admissions + 1e-6


def test_one_of_n_consecutive_admissions_may_overtake() -> None:
    overtaking = Overtaking()
    overtaking.admitted(True)
    ordinary = 0
    while not overtaking.allowed:
        overtaking.admitted(False)
        ordinary += 1
    assert ordinary + 1 == 10


def test_undoing_an_admission_restores_the_credit() -> None:
    overtaking = Overtaking()
    change = overtaking.admitted(True)
    assert not overtaking.allowed
    overtaking.withdrawn(True, change)
    assert overtaking.allowed and overtaking.count == 0


def test_wait_bound_follows_the_formula() -> None:
    aging = Aging(enabled=True, interval=10.0)
    assert wait_bound(aging, 4, older=2, admission_gap=0.5) == 50.0 + 3 * 10 * 0.5
    assert wait_bound(aging, 4, 2, 0.5, seat_seconds=7.0) == 50.0 + 3 * (10 * 0.5 + 7.0)
    assert wait_bound(Aging(), 0, 0, 0.5) is None


def arrive(core, name, level):
    hint = Hint(level, LevelSource.HINT)
    job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=False), 0.0)
    core.enqueue(job, core.waiting)
    return job


def aged_core() -> SchedulingCore:
    policy = parse_policy({"aging": {"enabled": True, "interval": 1.0}})
    return SchedulingCore(policy, load_profile("default"))


def take(core):
    job = core.waiting.peek()
    core.take(job, core.waiting)
    core.start(job)
    return job


def test_aged_job_gets_the_next_free_seat_without_preempting() -> None:
    core = aged_core()
    running = arrive(core, "standard", 2)
    take(core)
    aged, urgent = arrive(core, "aged", 4), arrive(core, "urgent", 0)
    step(core, lambda job: None, 5.0)
    assert aged.overdue and core.waiting.peek() is aged
    assert not core.eviction.worth_preempting(aged) and core.eviction.worth_preempting(urgent)
    assert list(core.waiting.ordered()) == [aged, urgent]
    assert core.running.least_urgent() is running


def test_aged_job_is_not_preempted_again() -> None:
    core = aged_core()
    aged = arrive(core, "aged", 4)
    step(core, lambda job: None, 5.0)
    take(core)
    urgent = arrive(core, "urgent", 0)
    assert not core.eviction.worth_preempting(urgent) and not core.eviction.wants_room
    assert core.running.order(aged)[0] == -1.0


def test_urgent_jobs_keep_their_share_when_all_jobs_are_overdue() -> None:
    core = aged_core()
    for number in range(50):
        arrive(core, f"background {number}", 4)
    step(core, lambda job: None, 100.0)
    levels = []
    for number in range(40):
        arrive(core, f"urgent {number}", 0)
        levels.append(take(core).level)
    assert levels.count(0) == 36
    assert levels[:11] == [4, *9 * [0], 4]


def test_job_that_was_not_ready_returns_unchanged() -> None:
    core = aged_core()
    aged, urgent = arrive(core, "aged", 4), arrive(core, "urgent", 0)
    step(core, lambda job: None, 5.0)
    core.take(aged, core.waiting)
    assert core.waiting.peek() is urgent
    core.requeue(aged, core.waiting)
    assert core.waiting.peek() is aged
    assert core.seating.overtaking.count == 0
