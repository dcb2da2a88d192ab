"""Times, counters and listeners over random events of many jobs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.record.lifecycle import IllegalTransition, Lifecycle, Transition

LEVELS = 3


class Recorder:
    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.first_tokens: list[Job] = []

    def moved(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def first_token(self, job: Job) -> None:
        self.first_tokens.append(job)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_lifecycle() -> tuple[Lifecycle, Recorder, Clock]:
    clock = Clock()
    lifecycle = Lifecycle(clock)
    recorder = Recorder()
    lifecycle.listeners.append(recorder)
    return lifecycle, recorder, clock


actions = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "move", "move", "move", "level", "token"]),
        st.integers(0, 30),
        st.sampled_from(list(JobState)),
        st.floats(0, 5),
    ),
    max_size=120,
)


@given(actions)
def test_times_add_up_and_counters_match_a_recount(actions) -> None:
    lifecycle, recorder, clock = make_lifecycle()
    jobs: list[Job] = []
    for action, pick, state, seconds in actions:
        clock.now += seconds
        if action == "arrive":
            jobs.append(make_job(pick % LEVELS, arrival=clock.now))
            lifecycle.arrive(jobs[-1])
        elif jobs:
            job = jobs[pick % len(jobs)]
            if action == "move":
                legal = recorder.transitions[:]
                try:
                    lifecycle.move(job, state, "because")
                except IllegalTransition:
                    assert recorder.transitions == legal
            elif action == "level":
                before, job.level = job.level, pick % LEVELS
                lifecycle.relevel(job, before)
            elif job.started is not None and not job.state.is_end:
                lifecycle.first_token(job)

        for level in range(LEVELS):
            here = [job for job in jobs if job.level == level and not job.state.is_end]
            waiting = [job for job in here if job.state is not JobState.RUNNING]
            assert lifecycle.waiting(level) == len(waiting)
            oldest = max((clock.now - job.entered for job in waiting), default=0.0)
            assert lifecycle.longest_wait(level) == oldest
        assert set(lifecycle.starting) == {
            job
            for job in jobs
            if job.started is not None and job.first_token is None and not job.state.is_end
        }
    for job in jobs:
        mine = [t for t in recorder.transitions if t.job is job]
        assert mine[0].before is None and mine[0].time == job.arrival
        for earlier, later in itertools.pairwise(mine):
            assert later.before is earlier.state and later.time >= earlier.time
        assert sum(t.state.is_end for t in mine) == job.state.is_end
        waited = sum(
            later.time - earlier.time
            for earlier, later in itertools.pairwise(mine)
            if earlier.state is not JobState.RUNNING
        )
        assert job.waited == pytest.approx(waited)
        starts = [t.time for t in mine if t.state is JobState.RUNNING]
        assert job.started == (starts[0] if starts else None)
    assert len(recorder.first_tokens) == len(set(recorder.first_tokens))
