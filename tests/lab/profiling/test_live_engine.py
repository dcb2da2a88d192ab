"""Timed copies leave the KV cache as it was."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine


def test_timed_copies_leave_the_cache_unchanged() -> None:
    import torch

    from vllm_semantic_sched.lab.profiling.live_engine import time_copies

    caches = [torch.randn(20, 2, 16, 32) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    config = SimpleNamespace(num_blocks=20)
    runner = SimpleNamespace(kv_caches=[*caches, caches[0]], kv_cache_config=config)
    copies = time_copies(SimpleNamespace(model_runner=runner), [1, 4, 16], repeats=2, seed=0)
    assert [len(times) for times in copies.save + copies.load] == [2] * 6
    assert all(seconds > 0 for times in copies.save + copies.load for seconds in times)
    # A layer that shares its storage with another counts once.
    assert copies.bytes_per_block == 3 * 2 * 16 * 32 * 4
    assert all(torch.equal(*pair) for pair in zip(before, caches, strict=True))
