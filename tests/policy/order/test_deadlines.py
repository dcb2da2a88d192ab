"""Rank gained for the SLO's time to first token, until that is missed."""

from jobs import make_job, policy_of, policy_ref, step, victims_for

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import Deadlines
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Credit, LevelSource, Preempted
from vllm_semantic_sched.policy.order.credit import CreditTimers
from vllm_semantic_sched.policy.profile.formula import load_profile


def test_job_is_raised_on_arrival_and_lowered_after_its_deadline() -> None:
    watch = CreditTimers(policy_ref(deadlines=Deadlines(enabled=True)))
    job = make_job(2, arrival=100.0)
    watch.wait(job, Slo(ttft=4.0))
    assert job.effective_level == 2
    assert watch.expire(100.0) == [job] and job.effective_level == 1.5
    assert watch.expire(103.9) == []
    watch.wait(job, Slo(ttft=4.0))  # not ready in this step: it stays raised
    assert job.effective_level == 1.5
    assert watch.expire(104.0) == [job] and job.effective_level == 2
    assert watch.expire(1000.0) == [] and watch.deadline_boosted == 1


def test_no_job_is_raised_after_its_deadline() -> None:
    watch = CreditTimers(policy_ref(deadlines=Deadlines(enabled=True)))
    job = make_job(2)
    watch.wait(job, Slo(ttft=4.0))
    assert watch.expire(4.0) == [] and not job.gain().deadline


def test_jobs_with_a_first_token_or_no_slo_are_not_watched() -> None:
    watch = CreditTimers(policy_ref(deadlines=Deadlines(enabled=True)))
    resumed, without_slo = make_job(2, generated=3, credit=Credit(deadline=0.5)), make_job(2)
    watch.wait(resumed, Slo(ttft=1.0))
    watch.wait(without_slo, Slo())
    assert watch.expire(0.9) == [] and not resumed.gain().deadline


def test_switching_off_stops_raising_waiting_jobs() -> None:
    ref, job = policy_ref(deadlines=Deadlines(enabled=True)), make_job(2)
    watch = CreditTimers(ref)
    watch.wait(job, Slo(ttft=4.0))
    ref.switch(policy_of())
    watch.wait(job, Slo(ttft=4.0))  # as after a reload
    assert watch.expire(3.0) == [] and not job.gain().deadline


def test_jobs_rise_at_most_to_level_0_and_level_0_jobs_above_it() -> None:
    job, urgent = make_job(1, credit=Credit(deadline=3.0)), make_job(0, credit=Credit(deadline=0.5))
    assert job.effective_level == 0.0 and not job.overdue
    assert urgent.effective_level < 0.0 and not urgent.overdue


def seated(core: SchedulingCore, level: int, first_token: bool, preemptions: int = 0):
    hint = Hint(level, LevelSource.HINT)
    name = f"{level} {first_token} {preemptions}"
    job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=False), 0.0)
    core.enqueue(job, core.waiting)
    core.take(job, core.waiting)
    core.start(job)
    job.preempted = Preempted(preemptions, urgent=preemptions)
    if first_token:
        core.first_token(job)
    return job


def core_with_slo(**slo) -> SchedulingCore:
    tiers = [{"name": "premium", "slo": {"ttft": 2.0, **slo}}, {"name": "rest"}]
    policy = {"levels": 2, "tiers": tiers, "deadlines": {"enabled": True}, "default_level": 1}
    return SchedulingCore(
        parse_policy(policy | {"preemption": {"max_per_request": 2}}), load_profile("default")
    )


def victims(core: SchedulingCore, job, seats: int = 1) -> list[str]:
    chosen = victims_for(core, job, Need(seats=seats, blocks=0), freed=1)
    return [victim.request_id for victim in chosen]


def test_takes_seats_preempts_own_tier_after_first_token() -> None:
    core = core_with_slo(takes_seats=True)
    seated(core, 0, first_token=False)
    seated(core, 0, first_token=True, preemptions=2)
    yields = seated(core, 0, first_token=True)
    job = core.arrive(
        core.draft("late", 50, 500, Hint(0, LevelSource.HINT), awaits_prediction=False), 0.0
    )
    core.enqueue(job, core.waiting)
    assert not core.eviction.wants_room and victims(core, job) == []
    step(core, lambda job: None, 1.5)
    assert core.eviction.wants_room and core.eviction.worth_preempting(job)
    assert victims(core, job) == [yields.request_id]
    assert victims(core, job, seats=2) == []  # two would not suffice
    rest = seated(core, 1, first_token=False)
    assert victims(core, job, seats=2) == [rest.request_id, yields.request_id]
    step(core, lambda job: None, 2.0)  # too late
    assert not core.eviction.worth_preempting(job) or victims(core, job, seats=2) == []


def test_tier_without_takes_seats_waits_for_a_seat() -> None:
    core = core_with_slo()
    seated(core, 0, first_token=True)
    job = core.arrive(
        core.draft("late", 50, 500, Hint(0, LevelSource.HINT), awaits_prediction=False), 0.0
    )
    core.enqueue(job, core.waiting)
    step(core, lambda job: None, 1.5)
    assert not core.eviction.wants_room and victims(core, job) == []


def test_deadline_boost_ends_with_the_first_token() -> None:
    core = core_with_slo(takes_seats=True)
    job = core.arrive(
        core.draft("late", 50, 500, Hint(0, LevelSource.HINT), awaits_prediction=False), 0.0
    )
    core.enqueue(job, core.waiting)
    step(core, lambda job: None, 1.5)
    core.take(job, core.waiting)
    core.start(job)
    other = core.arrive(
        core.draft("later", 50, 500, Hint(0, LevelSource.HINT), awaits_prediction=False), 0.2
    )
    core.enqueue(other, core.waiting)
    step(core, lambda job: None, 1.6)
    assert victims(core, other) == []
    core.first_token(job)
    assert not job.gain().deadline and victims(core, other) == ["late"]


def test_late_request_falls_behind_and_does_not_preempt() -> None:
    tiers = [{"name": "premium"}, {"name": "standard", "slo": {"ttft": 2.0}}, {"name": "rest"}]
    policy = {"base": "priority", "levels": 3, "default_level": 1, "tiers": tiers}
    policy["deadlines"] = {"enabled": True}
    core = SchedulingCore(parse_policy(policy), load_profile("default"))

    def arrive(name: str, level: int, at: float):
        hint = Hint(level, LevelSource.HINT)
        job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=False), at)
        core.enqueue(job, core.waiting)
        return job

    first, second = arrive("first", 1, 0.0), arrive("second", 1, 1.2)
    step(core, lambda job: None, 1.5)
    assert list(core.waiting.ordered()) == [first, second]
    premium = arrive("premium", 0, 1.5)
    step(core, lambda job: None, 2.1)  # too late for the first one
    assert list(core.waiting.ordered()) == [premium, second, first]
