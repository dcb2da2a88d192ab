"""Engines that this scheduler does not run on, and options that it replaces."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.lab.bench.standalone import build_scheduler

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return build_scheduler().vllm_config


def test_diffusion_models_keep_their_own_scheduler(config) -> None:
    assert vllm_api.why_refused(config) is None
    diffusion: Any = SimpleNamespace(model_config=SimpleNamespace(is_diffusion=True))
    with pytest.raises(ValueError, match="without --scheduler-cls"):
        SemanticScheduler(diffusion)


def test_ranks_that_schedule_by_themselves_are_refused(config, monkeypatch) -> None:
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", "external_launcher")
    assert vllm_api.why_unordered(config) is None  # one rank
    monkeypatch.setattr(config.parallel_config, "world_size", 2)
    with pytest.raises(ValueError, match="or the policy fcfs"):
        SemanticScheduler(config)
    monkeypatch.setenv("SEMSCHED_POLICY", "fcfs")
    with pytest.raises(TypeError, match="required positional arguments"):  # of vLLM's own
        SemanticScheduler(config)
    monkeypatch.delenv("SEMSCHED_POLICY")
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", "mp")
    assert vllm_api.why_unordered(config) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"max_num_queued_reqs": None, "max_num_queued_tokens": None}, []),
        ({"max_num_queued_reqs": 0}, ["--max-num-queued-reqs"]),
        ({"max_num_queued_tokens": 9}, ["--max-num-queued-tokens"]),
    ],
)
def test_limits_that_refuse_urgent_requests_too_are_named(given, named) -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(**given))
    assert vllm_api.limits_on_all(config) == named


@pytest.mark.parametrize(
    ("scheduling", "hints", "warned"),
    [("priority", "honor", True), ("priority", "vllm", False), ("fcfs", "honor", False)],
)
def test_priority_policy_of_vllm_warns(tmp_path, scheduling, hints, warned) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"predictor: {{enabled: false}}\nhints: {{priority: {hints}}}\n")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        build_scheduler(
            SemanticScheduler, semantic_sched={"policy": str(policy)}, policy=scheduling
        )
    finally:
        logger.removeHandler(handler)
    assert any("priority: vllm" in record.getMessage() for record in records) == warned


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tiers: [{name: red}]\nlevels: 1\ndefault_level: 0\n", "policy {path}, base semantic"),
        ("tiers: [{name: red}]\nlevels: 1\ndefault_level: 0\n", "may claim level 0 (red)"),
        ("base: fcfs\naging: {}\n", "policy {path}, base fcfs"),
        ("base: fcfs\naging: {}\n", "no effect: aging, predictor"),
    ],
)
def test_log_names_the_policy_and_what_to_know_of_it(tmp_path, caplog, text, words) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text + "predictor: {enabled: false}\n")
    with caplog.at_level(logging.INFO):
        build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    assert words.format(path=path) in caplog.text


def test_log_does_not_warn_where_hints_are_limited(tmp_path, caplog) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\nhints: {urgency: ignore, priority: ignore}\n")
    with caplog.at_level(logging.INFO):
        build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    assert "base semantic" in caplog.text and "may claim" not in caplog.text
