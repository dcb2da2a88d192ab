"""Readings that corrections refer to."""

import pytest
from jobs import make_job

from vllm_semantic_sched.engine.requests import endings
from vllm_semantic_sched.engine.requests.endings import RecentReadings
from vllm_semantic_sched.policy.facts.prediction import Prediction

pytestmark = pytest.mark.engine

PREDICTION = Prediction((0.25, 0.75))


def test_request_is_found_by_either_id_until_others_have_come(monkeypatch) -> None:
    monkeypatch.setattr(endings, "_KEPT", 2)
    kept = RecentReadings()
    wanted = {"probabilities": [0.25, 0.75], "level": 1}
    for name in ("cmpl-84a1-0-0123abcd", "chatcmpl-b-2-0123abcd"):
        kept.keep(make_job(1, request_id=name, prediction=PREDICTION))
    for name in ("cmpl-84a1", "cmpl-84a1-0-0123abcd", "chatcmpl-b-2-0123abcd"):
        assert kept.find(name) == wanted, name
    kept.keep(make_job(1, request_id="c", prediction=PREDICTION))
    assert kept.find("cmpl-84a1") is None and kept.find("c") == wanted


@pytest.mark.parametrize("route", ["chatcmpl-{}-0123abcd", "cmpl-{}-0-0123abcd"])
def test_requests_whose_ids_end_in_numbers_are_kept_apart(route) -> None:
    kept = RecentReadings()
    names = [route.format(number) for number in ("17", "18", "call-17")]
    for level, name in enumerate(names):
        kept.keep(make_job(level, request_id=name, prediction=PREDICTION))
    assert [kept.find(name)["level"] for name in names] == [0, 1, 2]
    assert kept.find(route.format("19")) is None


def test_what_the_predictor_has_not_read_is_not_kept() -> None:
    kept = RecentReadings()
    kept.keep(make_job(1, request_id="a"))
    kept.keep(make_job(1, request_id="b", prediction=PREDICTION, awaits_prediction=True))
    assert kept.find("a") is None and kept.find("b") is None
