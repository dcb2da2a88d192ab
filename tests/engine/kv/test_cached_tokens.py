"""What the prefix cache holds of waiting requests, as the rank by uncached work asks for it."""

from typing import Any

import pytest

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, draw_load
from vllm_semantic_sched.lab.device.virtual import run_virtual

pytestmark = pytest.mark.engine

LOAD = LoadConfig(
    requests=80,
    rate=20.0,
    prompts=Lengths(5, 0.8, 20, 1000),
    answers=Lengths(4, 0.6, 2, 200),
    prefixes=6,
)


def test_lookup_finds_what_vllm_finds(monkeypatch) -> None:
    """While blocks are evicted, shared, copied and freed by preemptions."""
    ask, answers = vllm_api.cached_tokens, list[tuple[int, int]]()

    def compare(scheduler: Any, request: Any) -> int:
        tokens = ask(scheduler, request)
        answers.append((tokens, scheduler.kv_cache_manager.get_computed_blocks(request)[1]))
        return tokens

    monkeypatch.setattr(vllm_api, "cached_tokens", compare)
    run_virtual(
        draw_load(LOAD),
        policy={"rank_uncached": True},
        seats=16,
        blocks=300,
        budget=512,
        max_model_len=2048,
        prefix_cache=True,
    )
    assert all(tokens == right for tokens, right in answers)
    assert len(set(answers)) > 10 and (0, 0) in answers
