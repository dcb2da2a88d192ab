"""An exception in this package costs one request its place, no server its life."""

import inspect
from types import SimpleNamespace

import pytest

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.kv import connector
from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
from vllm_semantic_sched.engine.metrics import stat_logger
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step

pytestmark = pytest.mark.engine


@pytest.fixture
def scheduler(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\npreemption: {enabled: false}\n")
    return build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)}, max_num_seqs=1)


def add(scheduler, name: str, urgency: int, **fields) -> None:
    scheduler.add_request(make_request(name, urgency=urgency, output_tokens=2, **fields))


def served(scheduler) -> list[str]:
    """Names in the order in which they got their seat."""
    order: list[str] = []
    for _ in range(200):
        if not scheduler.requests:
            return order
        run_step(scheduler)
        order += [one.request_id for one in scheduler.running if one.request_id not in order]
    raise AssertionError(scheduler.requests)


def fail(*args, **kwargs):
    raise RuntimeError("broken")


def test_request_that_cannot_be_read_runs_at_the_default_level(scheduler, monkeypatch) -> None:
    add(scheduler, "running", 0)
    run_step(scheduler)
    add(scheduler, "small talk", 4)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.arrivals, "_read", fail)
        add(scheduler, "unreadable", 0)
    add(scheduler, "urgent", 1)
    add(scheduler, "routine", 3)
    assert served(scheduler) == ["urgent", "unreadable", "routine", "small talk"]
    assert not scheduler.core.waiting and not scheduler.jobs


def test_order_by_urgency_returns_when_the_queue_has_emptied(scheduler, monkeypatch) -> None:
    add(scheduler, "running", 0)
    run_step(scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.core, "enqueue", fail)
        add(scheduler, "first", 4)
    add(scheduler, "second", 0)
    assert served(scheduler) == ["first", "second"]  # by arrival
    for name, urgency in (("filler", 4), ("late", 4), ("early", 0)):
        add(scheduler, name, urgency)
    assert served(scheduler) == ["early", "filler", "late"]
    assert not len(scheduler.core.waiting) and not len(scheduler.core.running)


GUARDED = [
    name
    for name, method in inspect.getmembers(SemanticSwapConnector, inspect.isfunction)
    if getattr(method, "is_guarded", False)
]
# A wrong answer of these could change an output: the worker or the step must fail instead.
FAIL_LOUDLY = {"update_state_after_alloc", "build_connector_meta"}


def test_every_method_that_vllm_calls_in_the_scheduler_is_guarded_or_must_fail_loudly() -> None:
    called = {
        "get_num_new_matched_tokens",
        "update_connector_output",
        "request_finished_all_groups",
        "reset_cache",
    }
    assert called == set(GUARDED)
    assert not FAIL_LOUDLY & set(GUARDED)


@pytest.mark.parametrize("name", GUARDED)
def test_failing_connector_method_answers_with_its_default(name, monkeypatch) -> None:
    monkeypatch.setattr(connector.logger, "exception", lambda *args: None)
    broken = SimpleNamespace(ledger=SimpleNamespace(release=lambda request_id: None))
    method = getattr(SemanticSwapConnector, name)
    request = SimpleNamespace(request_id="a", skip_reading_prefix_cache=False)
    answer = method(broken, request, 0) if name != "reset_cache" else method(broken)
    assert answer in ((0, False), (False, None), False, None)


def test_statistics_that_cannot_be_published_end_nothing(monkeypatch) -> None:
    reported = []
    monkeypatch.setattr(stat_logger, "detach_message", fail)
    monkeypatch.setattr(stat_logger.logger, "exception", reported.append)
    logger = SemanticStatLogger(None)
    logger.record(object())
    logger.record(object())
    assert len(reported) == 1
