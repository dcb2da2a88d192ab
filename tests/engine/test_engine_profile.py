"""The engine profile in the scheduler: warnings, and correction by measured steps."""

import pytest
import yaml

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.lab.bench.standalone import (
    build_scheduler,
    make_request,
    run_step,
)
from vllm_semantic_sched.policy.profile.formula import load_profile

pytestmark = pytest.mark.engine

STEP_SECONDS = 0.005


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds a scheduler with a profile; returns it and the warnings about the profile."""
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))

    def make(**profile):
        policy, path = tmp_path / "policy.yaml", tmp_path / "profile.yaml"
        policy.write_text("predictor: {enabled: false}\n")
        fields = load_profile("default").model_dump(mode="json", exclude_none=True) | profile
        path.write_text(yaml.safe_dump(fields))
        settings = {"policy": str(policy), "profile": str(path)}
        said.clear()
        scheduler = build_scheduler(SemanticScheduler, semantic_sched=settings, max_num_seqs=4)
        return scheduler, [text for text in said if "engine profile" in text]

    return make


def measured(longest: int) -> dict:
    return {
        "environment": {
            "date": "2026-11-21T12:00:00+00:00",
            "vllm": "0.32.0",
            "torch": "2.13.0",
            "device": "cpu",
            "dtype": "float32",
            "kv_dtype": "auto",
            "block_size": 16,
            "kv_bytes_per_token": 4096,
            "token_budget": 2048,
            "max_model_len": longest,
            "options": "MODEL",
            "statistic": "median of 5",
        },
        "ranges": {
            "prefill_tokens": [16, longest],
            "decode_context": [32, longest],
            "decode_batch": [1, 4],
            "transfer_tokens": [16, longest],
        },
    }


def test_unmeasured_profile_gives_one_warning_with_the_remedy(build) -> None:
    _, said = build()
    assert len(said) == 1
    assert "semsched profile" in said[0] and "--additional-config" in said[0]


def test_profile_shorter_than_the_context_gives_one_warning(build) -> None:
    scheduler, said = build(**measured(300))
    assert len(said) == 1
    assert "300" in said[0] and str(scheduler.max_model_len) in said[0]
    _, said = build(**measured(scheduler.max_model_len))
    assert said == []


def test_estimates_follow_measured_step_times(build, monkeypatch) -> None:
    scheduler, _ = build(**measured(8192))  # a decode step of it: 13.3 ms
    clock = scheduler.step_clock
    finished = clock.finished
    # Real times would be those of whatever else the machine does.
    monkeypatch.setattr(clock, "finished", lambda *args: (finished(*args)[0], STEP_SECONDS))
    for number in range(4):
        scheduler.add_request(make_request(f"r{number}", output_tokens=400))
    scale = scheduler.core.estimates.scale
    for _ in range(200):
        run_step(scheduler)
    assert scale.decode == pytest.approx(STEP_SECONDS / scale.given.gamma2, rel=0.07)
    assert scheduler.core.profile.gamma2 == pytest.approx(scale.given.gamma2 * scale.decode)
    assert scheduler.counters.total("policy_errors") == 0
