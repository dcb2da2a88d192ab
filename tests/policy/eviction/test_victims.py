"""Victim choice: least urgent first, only if it suffices, only a few times each."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.config.eviction import Preemption
from vllm_semantic_sched.policy.eviction.victims import choose_victims
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Rank
from vllm_semantic_sched.policy.order.running import RunningSet


def run(jobs) -> RunningSet:
    running = RunningSet(1.0)
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
    freed = {make_job(job_level, preemptions=n): free for job_level, n, free in jobs}
    limits = Preemption(min_level_gap=gap, max_per_request=3)
    need = Need(seats, blocks)
    victims = choose_victims(level, need, run(freed), limits, max_victims, freed.__getitem__)

    eligible = {
        job: free
        for job, free in freed.items()
        if free is not None and job.level >= level + gap and job.preemptions < 3
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


def test_cost_decides_within_a_level_and_rank_without_it() -> None:
    jobs = [make_job(level, computed=tokens) for level, tokens in ((4, 10), (4, 30), (3, 5))]
    limits = Preemption(victim="cost")
    seconds = {job: float(job.computed) for job in jobs}.__getitem__
    need = Need(1, 0)
    assert choose_victims(0, need, run(jobs), limits, 8, lambda job: 5, seconds) == [jobs[0]]
    assert choose_victims(0, need, run(jobs), Preemption(), 8, lambda job: 5, seconds) == [jobs[1]]
    # the level comes before the cost
    need = Need(3, 0)
    chosen = choose_victims(0, need, run(jobs), limits, 8, lambda job: 5, seconds)
    assert chosen == [jobs[0], jobs[1], jobs[2]]
