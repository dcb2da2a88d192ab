"""The job's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.record.lifecycle import IllegalTransition, Lifecycle

ENDS = ["completed", "failed", "cancelled", "refused"]
EDGES = {
    ("queued", "running"),
    ("running", "queued"),
    ("running", "swapped"),
    ("swapped", "running"),
    ("swapped", "queued"),
    *((state, end) for state in ("queued", "running", "swapped") for end in ENDS),
}


@given(st.lists(st.sampled_from(list(JobState)), max_size=20))
def test_only_legal_transitions_are_possible(walk) -> None:
    job, times = make_job(), iter(range(1, 21))
    lifecycle = Lifecycle(lambda: next(times))
    lifecycle.arrive(job)
    for time, state in enumerate(walk, 1):
        before, entered = job.state, job.entered
        if (before.value, state.value) in EDGES:
            lifecycle.move(job, state)
            assert (job.state, job.entered) == (state, time)
            assert state.is_end == (state.value in ENDS)
        else:
            with pytest.raises(IllegalTransition, match=job.request_id):
                lifecycle.move(job, state)
            assert (job.state, job.entered) == (before, entered)
