"""Models that answer a prompt with a vector or a score."""

from typing import Any

import pytest
from virtual_runs import FEATURE_LOAD, check_feature

from vllm_semantic_sched.lab.device.load import faster
from vllm_semantic_sched.lab.device.virtual import run_virtual
from vllm_semantic_sched.policy.overload.load import PressureLevel, PressureMonitor, Use

pytestmark = pytest.mark.engine

# Each prompt takes a step or two, so a queue needs more of them.
LOAD = faster(FEATURE_LOAD, 4)


def test_embeddings() -> None:
    """Prompts of up to seven steps: requests are preempted, but there are no decodes to hold."""
    shown = check_feature(LOAD, shape="e5-mistral-7b", seats=2, budget=64, holds=False)
    for one in shown:
        assert all(record.first_token in (None, record.ended) for record in one.records.values())


def test_embedding_model_pools() -> None:
    ran = run_virtual(LOAD, shape="e5-mistral-7b")
    assert ran.engine.core.get_supported_tasks() == ("embed",)
    assert [len(one.tokens) for one in ran.records] == [one.answer for one in LOAD]
    assert not any(step.batch.decodes for step in ran.steps)


@pytest.fixture
def kv_use(monkeypatch) -> list[float]:
    """The use of KV in each look at the engine's load."""
    uses: list[float] = []
    observe = PressureMonitor.observe

    def note(monitor: PressureMonitor, use: Use, now: float) -> PressureLevel:
        uses.append(use.kv)
        return observe(monitor, use, now)

    monkeypatch.setattr(PressureMonitor, "observe", note)
    return uses


@pytest.mark.parametrize("policy", [{}, {"kv_peak": {"enabled": True}}])
def test_model_without_kv_cache(policy, kv_use) -> None:
    """A step takes as many prompts as there are seats and tokens: no blocks limit it, and none are
    short."""
    bert: dict[str, Any] = {"shape": "bge-base", "max_model_len": 500, "blocks": None}
    limits = {"preempts": False, "holds": False, "budget": 1024}
    shown = check_feature(LOAD, policy=policy | {"correct_profile": False}, **bert, **limits)
    assert kv_use and not any(kv_use)
    for one in shown:
        assert max(step.batch.prefills for step in one.engine.steps) == 4
