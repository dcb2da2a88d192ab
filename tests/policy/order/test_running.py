"""The eviction heap and the supervisor's timer."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.facts.job import Rank
from vllm_semantic_sched.policy.order.running import RunningSet

STEP = 0.5


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(0, 20)),
        min_size=1,
        max_size=40,
    )
)
def test_eviction_order_is_level_then_current_remaining_time(starts) -> None:
    """Jobs start at different times; the remaining time at the end counts."""
    running = RunningSet(lambda: STEP)
    left = {}
    for level, steps, advance in starts:
        job = make_job(level)
        running.add(job, Rank(level, steps * STEP, job.sequence), steps * STEP)
        left[job] = steps
        for _ in range(advance):
            running.tick()
            for late in running.outlived():
                # comes up exactly when it should be done; gets ten steps more
                assert left[late] == 1
                left[late] = 11
                rank = Rank(late.level, 10 * STEP, late.sequence)
                running.add(late, rank, 10 * STEP)
            for job in left:
                left[job] -= 1
    expected = sorted(left, key=lambda job: (job.level, left[job], job.sequence), reverse=True)
    assert list(running.by_eviction()) == expected
    assert running.least_urgent() is expected[0]
    assert sorted(left, key=running.order) == expected[::-1]


def test_ranks_without_remaining_time_are_ordered_by_arrival() -> None:
    running = RunningSet(lambda: STEP)
    first, second = make_job(1), make_job(1)
    running.add(second, Rank(1, 0.0, second.sequence), 5.0)
    running.tick()
    running.add(first, Rank(1, 0.0, first.sequence), 50.0)
    assert list(running.by_eviction()) == [second, first]


def test_a_job_leaves_once() -> None:
    running = RunningSet(lambda: STEP)
    job = make_job()
    running.add(job, Rank(2, 1.0, 0), 1.0)
    assert job in running and len(running) == 1
    assert running.discard(job) and not running.discard(job)
    assert len(running) == 0 and running.least_urgent() is None
    for _ in range(5):
        running.tick()
        assert running.outlived() == []
