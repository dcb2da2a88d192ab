"""The waiting queue: min-heap plus unsorted buffer."""

from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.facts.job import Rank
from vllm_semantic_sched.policy.order.waiting import WaitingQueue


def default_rank(job) -> Rank:
    return Rank(2, float("inf"), job.sequence)


steps = st.lists(
    st.tuples(
        st.sampled_from(["buffer", "push", "predict", "remove", "pop"]),
        st.integers(0, 4),
        st.floats(0, 10),
        st.integers(0, 30),
    ),
    max_size=120,
)


@given(steps)
def test_best_job_of_heap_and_buffer_is_first_and_none_is_lost(steps) -> None:
    queue = WaitingQueue(default_rank)
    model = {}
    for kind, level, remaining, pick in steps:
        jobs = list(model)
        if kind in ("buffer", "push"):
            job = make_job(2 if kind == "buffer" else level)
            if kind == "buffer":
                queue.buffer(job)
                model[job] = default_rank(job)
            else:
                model[job] = Rank(level, remaining, job.sequence)
                queue.push(job, model[job])
        elif jobs and kind == "predict":
            job = jobs[pick % len(jobs)]
            job.level = level
            model[job] = Rank(level, remaining, job.sequence)
            queue.push(job, model[job])
        elif jobs and kind == "remove":
            job = jobs[pick % len(jobs)]
            assert queue.remove(job) and not queue.remove(job)
            del model[job]
        elif jobs:
            expected = min(model, key=model.__getitem__)
            assert queue.peek() is expected
            assert queue.pop() is expected
            del model[expected]
        assert len(queue) == len(model)
        assert list(queue.ordered()) == sorted(model, key=model.__getitem__)


def test_buffered_job_is_schedulable_without_a_better_one() -> None:
    queue = WaitingQueue(default_rank)
    unread, routine, urgent = make_job(), make_job(4), make_job(0)
    queue.buffer(unread)
    queue.push(routine, Rank(4, 1.0, routine.sequence))
    assert queue.peek() is unread
    queue.push(urgent, Rank(0, 9.0, urgent.sequence))
    assert [queue.pop() for _ in range(3)] == [urgent, unread, routine]
