"""Victim choice: least urgent first, only if it suffices, only a few times each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, victims_for

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.eviction import Preemption
from vllm_semantic_sched.policy.core import URGENT, SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Job, Preempted, Rank
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.preemption import choose_victims
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.retention import PreemptionKind


def run(jobs) -> RunningSet:
    running = RunningSet(lambda: 1.0)
    for job in jobs:
        running.add(job, Rank(job.level, 10.0, job.sequence), 10.0)
    return running


candidates = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 6))),
    max_size=12,
)


@given(
    candidates,
    st.integers(0, 4),
    st.integers(-3, 1),
    st.integers(-5, 20),
    st.integers(1, 3),
    st.integers(1, 6),
)
def test_victims(jobs, level, seats, blocks, gap, max_victims) -> None:
    freed = {
        make_job(job_level, preempted=Preempted(n, urgent=n)): free for job_level, n, free in jobs
    }
    limits = Preemption(min_level_gap=gap, max_per_request=3)
    need = Need(seats, blocks)
    victims = choose_victims(level, need, run(freed), limits, max_victims, freed.__getitem__)

    eligible = {
        job: free
        for job, free in freed.items()
        if free is not None and job.level >= level + gap and job.preempted.urgent < 3
    }
    assert set(victims) <= set(eligible) and len(victims) <= max_victims
    if victims:
        freed_blocks = sum(eligible[job] for job in victims)
        assert len(victims) >= seats and freed_blocks >= blocks, "evicted in vain"
        for job in victims:  # none was unnecessary
            assert len(victims) - 1 < seats or freed_blocks - eligible[job] < blocks
    elif not need.met and len(eligible) <= max_victims:
        assert len(eligible) < seats or sum(eligible.values()) < blocks, "gave up too early"


def test_least_urgent_jobs_are_victims_and_several_if_needed() -> None:
    jobs = [make_job(level) for level in (1, 4, 3, 4)]
    one = choose_victims(0, Need(1, 0), run(jobs), Preemption(), 8, lambda job: 5)
    assert one == [jobs[3]]  # of equals, the one that came last
    three = choose_victims(0, Need(1, 12), run(jobs), Preemption(), 8, lambda job: 5)
    assert set(three) == {jobs[3], jobs[1], jobs[2]}
    assert choose_victims(0, Need(1, 21), run(jobs), Preemption(), 8, lambda job: 5) == []
    assert choose_victims(4, Need(1, 0), run(jobs), Preemption(), 8, lambda job: 5) == []


def test_given_order_decides_within_a_level_and_rank_without_it() -> None:
    jobs = [make_job(level, computed=tokens) for level, tokens in ((4, 10), (4, 30), (3, 5))]
    limits = Preemption()
    seconds = {job: float(job.computed) for job in jobs}.__getitem__
    need = Need(1, 0)
    assert choose_victims(0, need, run(jobs), limits, 8, lambda job: 5, seconds) == [jobs[0]]
    assert choose_victims(0, need, run(jobs), limits, 8, lambda job: 5) == [jobs[1]]
    # the level comes before the cost
    need = Need(3, 0)
    chosen = choose_victims(0, need, run(jobs), limits, 8, lambda job: 5, seconds)
    assert chosen == [jobs[0], jobs[1], jobs[2]]


def victim_of(running: list[Job], **keys) -> Job | None:
    """The victim for a level-0 job; levels 1 and 2 may be dropped."""
    tiers = [{"name": "a"}, {"name": "b", "drop": True}, {"name": "c", "drop": True}]
    policy = {"levels": 3, "base": "priority", "preemption": keys, "tiers": tiers}
    core = SchedulingCore(parse_policy(policy), load_profile("default"))
    for job in running:
        core.start(job)
    urgent = make_job(0)
    core.requeue(urgent, core.waiting)
    victims = victims_for(core, urgent, Need(1, 0), freed=1)
    return victims[0] if victims else None


@pytest.mark.parametrize(
    ("generated", "preemptions", "first"),
    [((90, 9, 0), (0, 0, 1), 1), ((90, 510, 0), (0, 0, 1), 0), ((501, 510, 0), (0, 0, 1), 2)],
)
def test_progress_spares_long_answers_and_those_preempted_before(
    generated, preemptions, first
) -> None:
    jobs = [
        make_job(2, generated=tokens, preempted=Preempted(count))
        for tokens, count in zip(generated, preemptions, strict=True)
    ]
    assert victim_of([*jobs, make_job(1)], victim="progress") is jobs[first]


@pytest.mark.parametrize("after", ["protect", "promote", "drop"])
def test_last_preemption_protects_promotes_or_drops(after) -> None:
    keys = {"max_per_request": 1, "after_limit": after}
    tiers = [{"name": "a"}, {"name": "b"}, {"name": "c", "drop": True}]
    policy = {"levels": 3, "base": "priority", "preemption": keys, "tiers": tiers}
    core = SchedulingCore(parse_policy(policy), load_profile("default"))
    job, other = make_job(2), make_job(1)
    core.start(job)
    core.preempt(job, core.plan_preemption(job, job.computed, can_drop=True), URGENT)
    core.requeue(job, core.waiting)
    core.requeue(other, core.waiting)
    # Promoted, it is as urgent as the other one and came before it.
    assert core.waiting.peek() is (job if after == "promote" else other)
    core.take(core.waiting.peek(), core.waiting)
    if after != "promote":
        core.waiting.remove(job)
    assert victim_of([job], **keys) is (job if after == "drop" else None)
    kind = core.plan_preemption(job, job.computed, can_drop=True).kind
    assert (kind is PreemptionKind.DROP) == (after == "drop")
    assert (
        core.plan_preemption(job, job.computed).kind is PreemptionKind.RECOMPUTE
    )  # it cannot be told
    other_tier = make_job(1, preempted=Preempted(1, urgent=1))
    assert (
        core.plan_preemption(other_tier, other_tier.computed, can_drop=True).kind
        is PreemptionKind.RECOMPUTE
    )
