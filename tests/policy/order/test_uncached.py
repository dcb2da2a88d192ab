"""Rank of waiting jobs by the work that the prefix cache does not save."""

from collections import Counter

import pytest
from jobs import policy_of

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, JobState, LevelSource
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")


def make_core(**keys) -> SchedulingCore:
    core = SchedulingCore(policy_of(**({"rank_uncached": True} | keys)), PROFILE)
    core.set_capacity(EngineCapacity(seats=1, blocks=None, block_size=16))
    return core


def arrive(core: SchedulingCore, prompt: int, level: int = 2, now: float = 0.0) -> Job:
    hint = Hint(level, LevelSource.HINT)
    job = core.arrive(core.draft(f"{prompt} at {now}", prompt, 10, hint, False), now)
    core.enqueue(job, core.waiting)
    return job


def test_cached_prompt_runs_before_a_shorter_one() -> None:
    core = make_core()
    short, long = arrive(core, 1000), arrive(core, 8000)
    assert core.waiting.peek() is short
    core.refresh_cached({short: 0, long: 7992}.__getitem__)
    assert core.waiting.peek() is long
    core.refresh_cached({short: 0, long: 16}.__getitem__)  # evicted
    assert core.waiting.peek() is short


def test_level_comes_before_what_is_cached() -> None:
    core = make_core()
    urgent, cached = arrive(core, 8000, level=0), arrive(core, 8000, level=2)
    core.refresh_cached({urgent: 0, cached: 7984}.__getitem__)
    assert core.waiting.peek() is urgent


def test_aging_comes_before_what_is_cached() -> None:
    """A prompt that nobody shares runs at last, however many cached ones arrive."""
    core = make_core(base="sjf", aging={"enabled": True, "interval": 10.0})
    alone = arrive(core, 8000)

    def cached_tokens(job: Job) -> int:
        return 0 if job is alone else 992

    for second in range(1, 100):
        arrive(core, 1000, now=float(second))
        core.revise(lambda job: None, float(second))
        core.refresh_cached(cached_tokens)
        job = core.waiting.peek()
        core.take(job, core.waiting)
        core.start(job)
        if job is alone:
            break
        core.finish(job, AnswerEnd.STOPPED)
    assert alone.state is JobState.RUNNING
    assert second == 30  # three intervals: from level 2 to overdue


def test_number_of_lookups_in_a_step_is_bounded_and_every_job_gets_its_turn() -> None:
    core = make_core()
    jobs = [arrive(core, 100 + number, level=number % 5) for number in range(200)]
    asked = Counter[Job]()

    def note(job: Job) -> int:
        asked[job] += 1
        return 0

    for _ in range(40):
        before = asked.total()
        core.refresh_cached(note)
        assert asked.total() - before <= 5 * 2 + 8
    assert asked.keys() == set(jobs)


def test_jobs_that_have_left_are_not_asked_about() -> None:
    core = make_core()
    jobs = [arrive(core, 100 + number) for number in range(300)]
    for job in jobs[:-1]:
        core.waiting.remove(job)
    asked = set()
    core.refresh_cached(lambda job: asked.add(job) or 0)
    assert asked == {jobs[-1]}
    assert len(core.uncached._turns) == 1


def test_change_of_policy_takes_effect_on_waiting_jobs() -> None:
    core = make_core()
    short, long = arrive(core, 1000), arrive(core, 8000)
    core.refresh_cached({short: 0, long: 7992}.__getitem__)
    core.switch(policy_of(), PROFILE)
    core.revise(lambda job: None, 0.0)
    assert core.waiting.peek() is short
    core.switch(policy_of(rank_uncached=True), PROFILE)
    core.refresh_cached({short: 0, long: 7992}.__getitem__)
    assert core.waiting.peek() is long


def test_started_job_counts_what_it_has_computed() -> None:
    core = make_core()
    job = arrive(core, 8000)
    core.refresh_cached(lambda job: 7984)
    core.take(job, core.waiting)
    core.start(job)  # nothing of it is left in the cache
    assert core.running.remaining(job) >= PROFILE.prefill(0, 8000)


def test_order_without_remaining_time_is_refused() -> None:
    with pytest.raises(PolicyError, match="rank_uncached: true has no effect with base: priority"):
        parse_policy({"base": "priority", "rank_uncached": True})
