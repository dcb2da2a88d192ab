"""Hooks that patches/ adds to vLLM, and the workarounds for a vLLM without them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.vllm_api import capabilities
from vllm_semantic_sched.engine.vllm_api.capabilities import (
    HOOKS,
    REQUEST_ERROR,
    Hooks,
    find_hooks,
)
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

FULL = Refusal(Code.OVER_CAPACITY, "The server is full.", retry_after=7.0)
# What each hook adds to vLLM, by the class that has it then.
ADDED = {
    "preempt_for_waiting": (Scheduler, "preempt_for_waiting"),
    "refuse_request": (REQUEST_ERROR, "status"),
    "custom_stats": (SchedulerStats, "custom_stats"),
    "skip_next_step": (Scheduler, "skip_next_step"),
    "on_preemption": (Scheduler, "on_preemption"),
    "utilities": (EngineCore, "call_scheduler"),
}


def test_hooks_of_the_installed_vllm_are_found() -> None:
    there = {name: hasattr(owner, attr) for name, (owner, attr) in ADDED.items()}
    assert HOOKS._asdict() == there
    assert list(Hooks._fields) == list(ADDED)


def test_each_hook_is_found_by_itself() -> None:
    def classes(*names: str) -> Hooks:
        made = {owner: {} for owner in (Scheduler, EngineCore, SchedulerStats)}
        made |= {EngineCoreOutput: {"error": None}, REQUEST_ERROR: {}}
        for name in names:
            owner, attr = ADDED[name]
            made[owner][attr] = None
        return find_hooks(*(type("Fake", (), fields) for fields in made.values()))

    assert not any(classes())
    assert all(classes(*ADDED))
    for name in ADDED:
        assert classes(name)._asdict() == {other: other == name for other in ADDED}


def test_error_without_status_is_no_hook() -> None:
    error = type("Error", (), {"status": None})
    output = type("Output", (), {"error": None})
    assert find_hooks(object, object, object, output, error).refuse_request
    assert not find_hooks(object, object, object, output, object).refuse_request  # vLLM 0.33
    assert not find_hooks(object, object, object, object, error).refuse_request


def test_seam_overrides_and_patches_what_has_no_hook() -> None:
    build_scheduler(SemanticScheduler, semantic_sched={"policy": "ems"}).shutdown()
    own = vars(vllm_api.HookedScheduler)
    assert ("schedule" in own) != HOOKS.preempt_for_waiting
    assert ("_preempt_request" in own) != HOOKS.on_preemption
    assert hasattr(EngineCore, "semsched") != HOOKS.utilities
    assert (EngineCore.preprocess_add_request.__module__ == EngineCore.__module__) == (
        HOOKS.utilities
    )


def test_a_fake_hook_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "HOOKS", Hooks(*[True] * len(Hooks._fields)))
    called = []
    scheduler = SimpleNamespace(
        preempt=lambda request: called.append(("preempt", request)),
        skip_next_step=lambda request: called.append(("skip", request)),
        utilities={},
        defer_block_free=True,
    )
    vllm_api.preempt(scheduler, "a")
    vllm_api.hold_for_one_step(scheduler, "b")
    assert called == [("preempt", "a"), ("skip", "b")]
    vllm_api.free_blocks_at_once(scheduler)
    assert scheduler.defer_block_free  # the connector's matter
    vllm_api.add_utility(scheduler, "double", lambda of, number: (of is scheduler) * number * 2)
    assert scheduler.utilities["double"](4) == 8
    stats = SimpleNamespace(custom_stats=None)
    vllm_api.attach_message(stats, {"gauges": []})
    assert vllm_api.detach_message(stats) == {"gauges": []}
    assert vllm_api.detach_message(stats) is None


def test_preempted_requests_resume_by_the_hook_or_the_workaround(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("predictor: {enabled: false}\ncorrect_profile: false\n")
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=1, semantic_sched={"policy": str(policy)}
    )
    scheduler.add_request(make_request("calm", urgency=4, output_tokens=4))
    run_step(scheduler)
    scheduler.add_request(make_request("urgent", urgency=0, output_tokens=2))
    run_step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["urgent"]
    for _ in range(20):
        run_step(scheduler)
    assert not scheduler.requests
