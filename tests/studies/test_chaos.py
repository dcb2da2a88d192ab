"""Judgment of answers, and the requests and policies of the disturbed run."""

import pytest
from chaos import (
    BASE_POLICY,
    INVALID_POLICIES,
    VALID_POLICIES,
    Answer,
    Visit,
    judge,
    make_cases,
    make_visits,
    overspent,
)

from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.live import changed_keys, check_live_change

STAYS = Visit(0, True, {}, None)
LEAVES = Visit(0, True, {}, 0.1)


@pytest.mark.parametrize(
    ("visit", "answer", "outcome", "right"),
    [
        (STAYS, Answer(200, "abc", 1), "completed", True),
        (STAYS, Answer(200, "abd", 1), "completed", False),
        (STAYS, Answer(200, "abc", 2), "completed", False),
        (STAYS, Answer(200, "abc", 0), "completed", False),
        (STAYS, Answer(429, code="shed"), "refused: shed", True),
        (STAYS, Answer(200, "a", code="superseded"), "refused: superseded", True),
        (STAYS, Answer(500, code="shed"), "failed", False),
        (STAYS, Answer(500), "failed", False),
        (STAYS, Answer(200, "ab", left=True), "hung", False),
        (STAYS, Answer(problem="reset"), "failed", False),
        (LEAVES, Answer(200, "ab", left=True), "left", True),
        (LEAVES, Answer(None, "", left=True), "left", True),
        (LEAVES, Answer(200, "x", left=True), "left", False),
    ],
)
def test_answer_is_judged_by_the_undisturbed_one(visit, answer, outcome, right) -> None:
    came, problem = judge(visit, answer, "abc")
    assert came == outcome and (problem is None) == right


def test_requests_are_of_every_kind_and_reproducible() -> None:
    visits = make_visits(500, 30)
    assert visits == make_visits(500, 30) != make_visits(500, 30, seed=1)
    assert {visit.stream for visit in visits} == {True, False}
    assert any(visit.leaves_after is not None for visit in visits)
    assert any("dedup_key" in visit.extras for visit in visits)
    assert any(visit.extras.get("urgency") == "abc" for visit in visits)
    assert len({case.prompt for case in make_cases(30)}) == 30


def read(tmp_path, text: str) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_text(BASE_POLICY + text)
    return load_policy(path)


def test_valid_policies_are_accepted_and_invalid_ones_refused(tmp_path) -> None:
    base = read(tmp_path, "")
    for text in VALID_POLICIES:
        policy = read(tmp_path, text)
        check_live_change(base, policy)
        assert bool(changed_keys(base, policy)) == bool(text)
    for text in INVALID_POLICIES:
        with pytest.raises(PolicyError):
            check_live_change(base, read(tmp_path, text))


def test_holds_beyond_the_price_are_a_problem() -> None:
    assert overspent([], 0.05) == []
    assert overspent([0.0, 0.05, 0.03], 0.05) == []
    (problem,) = overspent([0.0, 0.06, 0.03], 0.05)
    assert problem == "holds cost 0.0600 of a minute, the price is 0.05"
