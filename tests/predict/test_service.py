"""The prediction service with a stand-in for the model process."""

import logging
import sys
import textwrap
import time

import pytest

from vllm_semantic_sched.policy.config import Predictor
from vllm_semantic_sched.predict import service as service_module
from vllm_semantic_sched.predict.service import PredictionService, PredictorError

# Answers level 0 for texts that contain "help", reports its batch size as the length, and
# misbehaves on request.
WORKER = textwrap.dedent(
    """
    import json, os, sys
    print(json.dumps({"ready": {"length_buckets": {"edges": [10], "means": [5.0, 50.0]}}}))
    sys.stdout.flush()
    for line in sys.stdin:
        message = json.loads(line)
        texts = message["texts"]
        if any("die" in text for text in texts):
            os._exit(3)
        if any("fail" in text for text in texts):
            answer = {"id": message["id"], "error": "ValueError: no"}
        else:
            answer = {
                "id": message["id"],
                "urgency": [[1.0, 0.0] if "help" in text else [0.0, 1.0] for text in texts],
                "length": [[float(len(texts)), 0.0] for text in texts],
            }
        print(json.dumps(answer))
        sys.stdout.flush()
    """
)


def decode(token_ids: list[int]) -> str:
    return bytes(token_ids).decode("ascii")


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setattr(service_module, "_FIRST_BACKOFF", 0.05)
    services = []

    def build(worker: str = WORKER, **settings) -> PredictionService:
        service = PredictionService(
            Predictor(**settings),
            decode,
            logging.getLogger("test"),
            command=(sys.executable, "-c", worker),
        )
        services.append(service)
        service.buckets = service.start()
        return service

    yield build
    for service in services:
        service.close()
        assert not service.up, "a predictor process was left behind"


def wait_for(service: PredictionService, count: int) -> dict:
    """Results by request id; fails if they do not come."""
    results = {}
    deadline = time.monotonic() + 20
    while len(results) < count:
        results.update(service.drain())
        assert time.monotonic() < deadline, f"only {results}"
        time.sleep(0.005)
    return results


def test_predictions_come_back_by_request(start) -> None:
    service = start()
    assert service.buckets.means == (5.0, 50.0)
    assert service.submit("a", b"help") and service.submit("b", b"hello")
    results = wait_for(service, 2)
    assert results["a"].urgency == (1.0, 0.0) and results["b"].urgency == (0.0, 1.0)
    assert service.drain() == [] and service.pending == 0


def test_full_batching_waits_for_a_batch_or_its_time(start) -> None:
    service = start(mode="full_batching", max_batch=4, max_wait=0.5)
    for name in "abcd":
        service.submit(name, b"x")
    assert {p.length[0] for p in wait_for(service, 4).values()} == {4.0}
    begin = time.monotonic()
    service.submit("e", b"x")
    assert wait_for(service, 1)["e"].length[0] == 1.0
    assert time.monotonic() - begin >= 0.5


def test_a_batch_never_exceeds_its_limit(start) -> None:
    service = start(max_batch=3)
    for number in range(20):
        service.submit(str(number), b"x")
    assert max(p.length[0] for p in wait_for(service, 20).values()) <= 3


def test_a_full_queue_refuses_and_a_cancelled_prompt_is_forgotten(start) -> None:
    service = start(mode="full_batching", max_batch=9, max_wait=60, max_queue=2)
    assert service.submit("a", b"x") and service.submit("b", b"x")
    assert not service.submit("c", b"x")
    service.cancel("a")
    assert service.submit("c", b"x") and service.pending == 2


def test_a_dead_predictor_is_replaced_and_what_it_had_is_answered_with_none(start) -> None:
    service = start(max_batch=1)
    for name, text in (("a", b"die"), ("b", b"help"), ("c", b"die"), ("d", b"help")):
        service.submit(name, text)
    results = wait_for(service, 4)
    assert results["a"] is None and results["c"] is None
    assert results["b"].urgency == results["d"].urgency == (1.0, 0.0)
    assert service.up


def test_an_error_answer_and_undecodable_tokens_cost_only_their_own_batch(start) -> None:
    service = start(max_batch=1)
    service.submit("a", b"fail")
    service.submit("b", [300])  # decode() cannot make bytes of this
    service.submit("c", b"help")
    results = wait_for(service, 3)
    assert results["a"] is None
    assert results["b"].urgency == (0.0, 1.0) and results["c"].urgency == (1.0, 0.0)


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ('print(\'{"failed": "OSError: no such model"}\')', "no such model"),
        ("import sys; sys.exit(9)", "status 9"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_reported_at_start(start, worker, message) -> None:
    with pytest.raises(PredictorError, match=message):
        start(worker)
