"""Refusals: codes, statuses and their way through a text field."""

from types import SimpleNamespace

import pytest

from vllm_semantic_sched import Refusal, refusal_of
from vllm_semantic_sched.policy.overload.refusal import Code


@pytest.mark.parametrize("code", Code)
def test_refusal_survives_a_round_trip_through_text(code) -> None:
    refusal = Refusal(code, 'the queue is full: 100 of 100, "premium"', 12.0)
    assert Refusal.from_text(refusal.to_text()) == refusal


@pytest.mark.parametrize("code", Code)
def test_refusal_survives_a_round_trip_through_an_error_message(code) -> None:
    refusal = Refusal(code, "full (shed, retry after 3 s), line\ntwo", 12.0)
    assert refusal_of(RuntimeError(refusal.to_sentence())) == refusal
    assert refusal_of(RuntimeError(refusal.message)) is None


def test_refusal_is_read_from_the_error_of_a_patched_vllm() -> None:
    error = RuntimeError("full")
    error.code, error.retry_after = "over_capacity", 12
    assert refusal_of(error) == Refusal(Code.OVER_CAPACITY, "full", 12.0)
    error.code = "another"
    assert refusal_of(error) is None


def test_codes_have_the_statuses_that_clients_know() -> None:
    assert {code.value: code.status for code in Code} == {
        "over_capacity": 429,
        "shed": 429,
        "superseded": 429,
        "tier_over_share": 429,
        "tenant_over_share": 429,
        "queue_timeout": 408,
        "deadline": 429,
        "dropped": 503,
        "too_large": 400,
        "stopping": 503,
    }


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.1, "3"), (60, "60")])
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, header) -> None:
    assert Refusal(Code.SHED, "busy", seconds).headers() == {"retry-after": header}


def test_superseded_request_is_not_retryable() -> None:
    assert Refusal(Code.SUPERSEDED, "newer").headers()["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "stop_reason", [None, 7, "</s>", "{", "[]", "3", '{"code": "shed"}', '{"code": "x"}']
)
def test_other_stop_reasons_are_not_refusals(stop_reason) -> None:
    answer = SimpleNamespace(finish_reason="error", stop_reason=stop_reason)
    assert refusal_of(SimpleNamespace(outputs=[answer])) is None


def test_refusal_is_read_only_from_error_outputs() -> None:
    refusal = Refusal(Code.SHED, "busy", 2.0)
    answer = SimpleNamespace(finish_reason="error", stop_reason=refusal.to_text())
    assert refusal_of(SimpleNamespace(outputs=[answer])) == refusal
    answer.finish_reason = "stop"  # a model cannot talk itself into a refusal
    assert refusal_of(SimpleNamespace(outputs=[answer])) is None


def test_refusal_keeps_its_deadline_in_all_forms() -> None:
    refusal = Refusal(Code.DEADLINE, "No answer within 1.0 s", 3.0, deadline_ms=4200)
    assert Refusal.from_text(refusal.to_text()) == refusal
    assert Refusal.from_sentence(refusal.to_sentence()) == refusal
    assert refusal.headers() == {"retry-after": "3"}
