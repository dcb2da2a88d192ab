"""Small models of several kinds, with random weights, on vLLM's CPU engine: what only a model that
computes can show. MLA is left out: on a CPU its decodes differ from its prefills at near ties, with
vLLM's own scheduler, too."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.model]

SCRIPT = Path(__file__).with_name("small_models.py")
GENERATING = ("plain", "hybrid", "whisper", "tensor parallel")
POOLED = ("embedding", "reranker")
LOW, URGENT = {"a", "b", "c", "d"}, {"u0", "u1", "u2", "u3"}


@pytest.fixture(scope="module")
def report_of(tmp_path_factory, run_offline) -> Callable[[str], dict[str, Any]]:
    """What came of a kind, which runs once."""
    policy = tmp_path_factory.mktemp("small") / "mine.yaml"
    policy.write_text("predictor: {enabled: false}\nretention: {mode: swap}\n")

    @functools.cache
    def report(kind: str) -> dict[str, Any]:
        printed = run_offline(SCRIPT, policy, kind)
        (line,) = [line for line in printed.splitlines() if line.startswith('{"kind": ')]
        return json.loads(line)

    return report


def assert_nothing_lost(report: dict[str, Any], calm: str, disturbed: str) -> None:
    """The same answers although urgent requests came in between, and nothing is left."""
    answers = report[calm]["answers"]
    assert set(answers) == LOW
    assert len({json.dumps(answer) for answer in answers.values()}) == len(LOW)
    assert report[disturbed]["answers"] == answers
    assert report["errors"] == 0 and report["left"] == 0


@pytest.mark.parametrize("kind", GENERATING)
def test_preempted_requests_get_the_same_answers(report_of, kind) -> None:
    """With `plain`, the log-probabilities of the prompt, too; on two workers after a copy of KV has
    come back from the host."""
    report = report_of(kind)
    assert_nothing_lost(report, "calm", "disturbed")
    assert report["preempted"] >= 4
    order = report["disturbed"]["order"]
    assert set(order) == LOW | URGENT
    assert set(order[:3]) <= URGENT  # each took a seat
    assert (report["loaded"] > 0) == (kind == "tensor parallel")


def test_seeded_answers_to_one_prompt_stay_the_same(report_of) -> None:
    """Three answers to each prompt."""
    report = report_of("plain")
    assert_nothing_lost(report, "calm n", "disturbed n")
    assert report["preempted n"] >= 4
    assert set(report["disturbed n"]["order"][:3]) <= URGENT
    tokens, _ = report["calm n"]["answers"]["a"]
    assert len({tuple(answer) for answer in tokens}) == 3


def test_prompt_logprobs_are_given_for_all_places_but_the_first(report_of) -> None:
    for run in ("calm", "disturbed"):
        for _, logprobs in report_of("plain")[run]["answers"].values():
            assert len(logprobs) == 39


@pytest.mark.parametrize("kind", POOLED)
def test_urgent_pooling_request_overtakes(report_of, kind) -> None:
    report = report_of(kind)
    assert_nothing_lost(report, "calm", "disturbed")
    assert report["calm"]["order"] == ["a", "b", "c", "d"]
    assert report["disturbed"]["order"][0] == "u0"
