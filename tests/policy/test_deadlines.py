"""Rank gained shortly before a promised time to first token runs out."""

from jobs import make_job

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.hints import Hint
from vllm_semantic_sched.policy.estimates.profile import load_profile
from vllm_semantic_sched.policy.job import LevelSource
from vllm_semantic_sched.policy.order.deadlines import Deadlines, DeadlineWatch


def test_a_job_is_raised_in_time_and_let_go_when_it_is_too_late() -> None:
    watch = DeadlineWatch(Deadlines(enabled=True, levels=0.5, before=0.25))
    job = make_job(2, arrival=100.0)
    watch.wait(job, 4.0)
    assert watch.due(102.9) == [] and job.effective_level == 2
    assert watch.due(103.0) == [job] and job.effective_level == 1.5
    assert watch.due(103.9) == []
    watch.wait(job, 4.0)  # not ready in this step: it stays raised
    assert job.effective_level == 1.5
    assert watch.due(104.0) == [job] and job.effective_level == 2
    assert watch.due(1000.0) == [] and watch.count == 1


def test_a_step_that_comes_too_late_raises_nobody() -> None:
    watch = DeadlineWatch(Deadlines(enabled=True))
    job = make_job(2)
    watch.wait(job, 4.0)
    assert watch.due(4.0) == [] and not job.hurried


def test_whoever_has_a_first_token_or_no_promise_is_not_watched() -> None:
    watch = DeadlineWatch(Deadlines(enabled=True))
    resumed, unpromised = make_job(2, generated=3, hurried=0.5), make_job(2)
    watch.wait(resumed, 1.0)
    watch.wait(unpromised, None)
    assert watch.due(0.9) == [] and not resumed.hurried


def test_switched_off_while_jobs_wait_it_raises_nobody_any_more() -> None:
    watch, job = DeadlineWatch(Deadlines(enabled=True)), make_job(2)
    watch.wait(job, 4.0)
    watch.knobs = Deadlines()
    watch.wait(job, 4.0)  # as after a reload
    assert watch.due(3.0) == [] and not job.hurried


def test_nobody_is_raised_beyond_the_most_urgent_level() -> None:
    job = make_job(1, hurried=3.0)
    assert job.effective_level == 0.0 and not job.overdue


def test_in_the_queue_a_near_deadline_goes_first_but_does_not_preempt() -> None:
    tiers = [{"name": "premium"}, {"name": "standard", "slo": {"ttft": 2.0}}, {"name": "rest"}]
    policy = {"levels": 3, "default_level": 1, "tiers": tiers, "deadlines": {"enabled": True}}
    core = SchedulingCore(parse_policy(policy), load_profile("default"))

    def arrive(name: str, level: int, at: float, prompt: int = 50):
        hint = Hint(level, LevelSource.HINT)
        job = core.new_job(name, at, prompt, 500, hint, awaits_prediction=False)
        core.enqueue(job, core.waiting)
        return job

    first = arrive("long", 1, 0.0, prompt=5000)
    arrive("short", 1, 1.2)
    assert core.waiting.peek().request_id == "short"
    core.step(lambda job: None, 1.5)
    assert core.waiting.peek() is first
    premium = arrive("premium", 0, 1.5)
    assert core.waiting.peek() is premium
