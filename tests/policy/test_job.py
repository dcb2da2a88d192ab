"""The job's state machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.errors import IllegalTransition
from vllm_semantic_sched.policy.job import JobState

EDGES = {
    ("waiting", "running"),
    ("waiting", "finished"),
    ("running", "waiting"),
    ("running", "swapped"),
    ("running", "finished"),
    ("swapped", "running"),
    ("swapped", "waiting"),
    ("swapped", "finished"),
}


@given(st.lists(st.sampled_from(list(JobState)), max_size=20))
def test_only_the_edges_of_the_diagram_can_be_taken(walk) -> None:
    job = make_job()
    for state in walk:
        before = job.state
        if (before.value, state.value) in EDGES:
            job.move_to(state)
            assert job.state is state
        else:
            with pytest.raises(IllegalTransition, match=job.request_id):
                job.move_to(state)
            assert job.state is before
