"""Order by the deadlines that requests state: within a level only, least slack first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job, LevelSource, StatedDeadlines, StatedLength
from vllm_semantic_sched.policy.profile.formula import load_profile

STATED = {"deadlines": {"stated": True}}


def make_core(policy: dict) -> SchedulingCore:
    core = SchedulingCore(parse_policy(policy), load_profile("default"))
    core.set_capacity(EngineCapacity(seats=4, blocks=None, block_size=16))
    return core


def queue(
    core: SchedulingCore, name: str, level: int, tokens: int, now: float = 0.0, **times
) -> Job:
    """Queue a request whose answer has exactly so many tokens."""
    job = core.draft(
        name,
        prompt_tokens=50,
        max_output_tokens=tokens,
        hint=Hint(level, LevelSource.HINT),
        awaits_prediction=False,
        stated=StatedLength(tokens, tokens),
    )
    job.deadlines = StatedDeadlines(**times)
    core.arrive(job, now)
    core.enqueue(job, core.waiting)
    return job


def order(core: SchedulingCore, now: float) -> list[str]:
    core.revise(lambda job: None, now)
    return [job.request_id for job in core.waiting.ordered()]


@pytest.mark.parametrize("base", ["semantic", "priority"])
def test_least_slack_goes_first_within_a_level_and_the_rest_after_it(base) -> None:
    core = make_core(STATED | {"base": base})
    queue(core, "without", 2, 10)
    queue(core, "loose", 2, 20, answer=150.0)
    queue(core, "tight but short", 2, 10, answer=160.0)
    probe = queue(make_core({}), "probe", 2, 8000)
    seconds = core.seating.answer_seconds(probe)
    queue(core, "long", 2, 8000, answer=100.0 + seconds)  # the latest of all deadlines
    queue(core, "first token", 2, 900, first_token=110.0)
    queue(core, "urgent", 1, 8000)
    queue(core, "less urgent", 3, 10, answer=100.0)
    assert 100.0 + seconds > 160.0
    expected = ["urgent", "long", "first token", "loose", "tight but short", "without"]
    assert order(core, 0.0) == [*expected, "less urgent"]


def test_without_the_key_deadlines_change_nothing() -> None:
    core = make_core({})
    queue(core, "short", 2, 10, answer=100.0)
    queue(core, "long", 2, 200, answer=5.0, first_token=1.0)
    assert order(core, 0.0) == ["short", "long"]


def test_request_that_cannot_keep_its_deadline_falls_back() -> None:
    core = make_core(STATED)
    late = queue(core, "late", 2, 100, answer=50.0)
    queue(core, "short", 2, 10)
    assert order(core, 0.0) == ["late", "short"]
    answer = core.seating.answer_seconds(late)
    assert order(core, 50.0 - answer - 0.001) == ["late", "short"]
    assert order(core, 50.0 - answer + 0.001) == ["short", "late"]


def test_deadline_gets_no_right_to_preempt() -> None:
    tiers = [{"name": "a"}, {"name": "b"}]
    core = make_core(STATED | {"levels": 2, "default_level": 1, "tiers": tiers})
    queue(core, "hurried", 1, 10, answer=60.0)
    core.revise(lambda job: None, 0.0)
    assert not core.seating.credits.may_take_seats


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(1, 400),
            st.none() | st.floats(0.01, 100.0),
            st.none() | st.floats(0.01, 100.0),
        ),
        min_size=1,
        max_size=20,
    ),
    st.floats(0.0, 120.0),
)
def test_deadlines_never_cross_levels(requests, now) -> None:
    core = make_core(STATED)
    for number, (level, tokens, answer, first_token) in enumerate(requests):
        queue(core, str(number), level, tokens, answer=answer, first_token=first_token)
    levels = [requests[int(name)][0] for name in order(core, now)]
    assert levels == sorted(levels)


def test_stated_deadlines_need_levels() -> None:
    with pytest.raises(PolicyError, match=r"deadlines\.stated: needs levels"):
        parse_policy({"base": "sjf"} | STATED)
