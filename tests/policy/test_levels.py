"""Which rights a level gives, from the arrival of a request to its last reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import policy_of

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import preempting_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")
SURE = Prediction((0.95, 0.05, 0.0, 0.0, 0.0))
LIKELY = Prediction((0.6, 0.3, 0.1, 0.0, 0.0))


def make_core(**keys) -> SchedulingCore:
    return SchedulingCore(policy_of(**keys), PROFILE)


def glanced(core: SchedulingCore, provisional: Prediction | None, urgency=None) -> Job:
    hint = core.read_hints({} if urgency is None else {"urgency": urgency}, 0)
    job = core.arrive(core.draft("r", 50, 500, hint, True, provisional=provisional), 0.0)
    core.enqueue(job, core.waiting)
    return job


weights = st.lists(st.floats(0.001, 1.0), min_size=5, max_size=5)
readings = st.builds(
    Prediction,
    weights.map(lambda each: tuple(one / sum(each) for one in each)),
    decision=st.sampled_from([(), (0.2, 0.25, 0.5, 0.5), (0.9, 0.9, 0.9, 0.9)]).map(Decision),
)
corrections = st.one_of(
    st.tuples(st.just("read"), readings | st.none()),
    st.tuples(st.just("reload"), st.sampled_from([1.0, 12.0])),
    st.tuples(st.just("tell"), st.integers(0, 4)),
)


@given(
    st.sampled_from(["order", "start", "preempt"]),
    readings | st.none(),
    st.none() | st.integers(0, 4),
    st.lists(corrections, max_size=5),
)
def test_rights_follow_the_probability_until_a_level_is_final(may, first, urgency, events) -> None:
    keys = {"predictor": {"instant": may}}
    core = make_core(**keys)
    job = glanced(core, first, urgency)
    for kind, value in [("", None), *events]:
        if kind == "read":
            core.predicted(job, value)
        elif kind == "reload":
            core.switch(policy_of(decision={"missed_cost": (value,)}, **keys), PROFILE)
            core.revise(lambda job: None, 0.0)
        elif kind == "tell":
            core.levels.tell(job, value, LevelSource.HINT)
        expected = job.level
        if job.level_source is LevelSource.INSTANT:
            expected = preempting_level(core.policy, job.prediction.urgency, job.level)
        assert job.entitled_level == expected


@pytest.mark.parametrize(("provisional", "protected"), [(SURE, True), (LIKELY, False)])
def test_others_are_held_for_a_provisional_level_as_far_as_it_is_probable(
    provisional, protected
) -> None:
    core = make_core(protect={"level": 0})
    job = glanced(core, provisional)
    assert job.level == 0
    assert core.protection.protects(job) == protected
    core.predicted(job, provisional)
    assert core.protection.protects(job)
