"""The second look: in what order requests are read again, and that it only raises levels."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import CERTAIN_PART, doubt, raised_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.profile.formula import load_profile

DECISION = Decision()
SURE = (0.0, 0.0, 0.0, 0.0, 1.0)
EMERGENCY = Prediction((0.99, 0.0, 0.0, 0.0, 0.01), again=True)

shares = (
    st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5)
    .filter(sum)
    .map(lambda parts: tuple(part / sum(parts) for part in parts))
)


def test_the_likely_emergency_and_the_hidden_text_are_read_first() -> None:
    vague = (0.1, 0.1, 0.1, 0.1, 0.6)
    ordered = [
        doubt(SURE, 4, 0.0, DECISION),
        doubt(SURE, 4, 0.5, DECISION),
        doubt(SURE, 4, 0.9, DECISION),
        doubt(vague, 4, 0.5, DECISION),
    ]
    assert ordered == sorted(set(ordered)) and ordered[0] == 0
    assert doubt(vague, 0, 1.0, DECISION) == 0  # there is nothing to raise


@given(shares, st.integers(0, 4))
def test_a_level_is_only_raised_and_only_with_certainty(probabilities, level) -> None:
    raised = raised_level(probabilities, level)
    certain = [at for at in range(5) if sum(probabilities[: at + 1]) >= CERTAIN_PART - 1e-5]
    assert raised is None or (raised in certain and raised < level)


def read(core: SchedulingCore, name: str, prediction: Prediction, **hint: int) -> Job:
    """A waiting job of which the first reading is back."""
    hints = core.read_hints(hint or None, 0)
    job = core.arrive(core.draft(name, 500, 50, hints, awaits_prediction=not hint), 0.0)
    core.enqueue(job, core.waiting)
    core.predicted(job, prediction)
    return job


def make_core(**policy) -> SchedulingCore:
    return SchedulingCore(parse_policy(policy), load_profile("default"))


def test_raised_request_overtakes_those_that_it_waited_behind() -> None:
    core = make_core()
    first, hidden = read(core, "first", Prediction(SURE)), read(core, "hidden", Prediction(SURE))
    assert core.waiting.peek() is first
    core.predicted(hidden, EMERGENCY)
    assert (hidden.level, hidden.level_source) == (0, LevelSource.SECOND_LOOK)
    assert core.waiting.peek() is hidden
    core.predicted(hidden, Prediction(SURE, again=True))
    assert hidden.level == 0


class Notes(list):
    """A journal that keeps what a level was raised from, and by what."""

    def noted(self, job: Job, what: str, details: Mapping[str, Any]) -> None:
        self.append((job.request_id, what, details))


def test_raised_level_is_explained_by_what_the_second_look_read() -> None:
    core = make_core()
    job, notes = read(core, "a", Prediction(SURE)), Notes()
    core.record_why(notes)
    core.predicted(job, Prediction(SURE, again=True))
    core.predicted(job, EMERGENCY)
    read_again = {"level_before": 4, "rule": "second_look", "urgency": [*EMERGENCY.urgency]}
    assert notes == [("a", "read", read_again)]


def test_doubtful_parts_and_hinted_requests_stay() -> None:
    core = make_core()
    job, hinted = read(core, "a", Prediction(SURE)), read(core, "b", Prediction(SURE), urgency=3)
    core.predicted(job, Prediction((0.97, 0.0, 0.0, 0.0, 0.03), again=True))
    core.predicted(hinted, EMERGENCY)
    assert (job.level, job.level_source) == (4, LevelSource.PREDICTION)
    assert (hinted.level, hinted.level_source) == (3, LevelSource.HINT)


def test_raised_level_survives_reload_and_respects_tenant_cap() -> None:
    core = make_core()
    job = read(core, "a", Prediction(SURE))
    core.predicted(job, EMERGENCY)
    core.switch(parse_policy({"decision": {"missed_cost": [2.0]}}), core.profile)
    core.revise(lambda job: None, 0.0)
    assert job.level == 0

    capped = make_core(tenants={"top": {"share": 0.01}})  # five a minute are free
    jobs = [read(capped, name, Prediction(SURE)) for name in "abcdef"]
    for job in jobs:
        capped.predicted(job, EMERGENCY)
    assert [job.level for job in jobs] == [0] * 5 + [1]


@given(st.lists(st.tuples(st.integers(0, 3), shares), max_size=30))
def test_no_second_look_ever_makes_a_request_wait_longer(readings) -> None:
    core = make_core()
    jobs = [read(core, str(number), Prediction(SURE)) for number in range(4)]
    for at, probabilities in readings:
        before = core.rank(jobs[at])
        core.predicted(jobs[at], Prediction(probabilities, again=True))
        assert core.rank(jobs[at]) <= before
    assert [*core.waiting.ordered()] == sorted(jobs, key=core.rank)
