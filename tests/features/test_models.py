"""Models of all kinds on the emulated device: what their layers keep of a token, and in how many
block tables."""

from dataclasses import replace

import pytest
from virtual_runs import FEATURE_LOAD, check_feature

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_experts(prefix_cache) -> None:
    check_feature(shape="qwen3-30b-a3b", prefix_cache=prefix_cache)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_compressed_kv(prefix_cache) -> None:
    check_feature(shape="deepseek-v2-lite", prefix_cache=prefix_cache)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_sparse_attention(prefix_cache) -> None:
    check_feature(shape="deepseek-v3.2", prefix_cache=prefix_cache)


WINDOW = {"hf_overrides": {"sliding_window": 64}}


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_sliding_window(prefix_cache) -> None:
    check_feature(shape="sliding-8b", blocks=165, prefix_cache=prefix_cache, options=WINDOW)


def test_sliding_window_in_one_block_table() -> None:
    options = WINDOW | {"disable_hybrid_kv_cache_manager": True}
    check_feature(shape="sliding-8b", options=options)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_several_block_sizes(prefix_cache) -> None:
    """16 tokens where layers see all, 32 where they see a window."""
    sizes = {"sliding_window": 64, "swa_num_key_value_heads": 4}
    check_feature(
        shape="sliding-8b",
        blocks=110,
        prefix_cache=prefix_cache,
        options={"hf_overrides": sizes},
    )


# Blocks hold 400 tokens, and states are found again at their ends.
BEGINNINGS = [tuple(range(first, first + 420)) for first in (100, 700)]
LONG = [replace(one, prompt=BEGINNINGS[at % 2] + one.prompt) for at, one in enumerate(FEATURE_LOAD)]


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_hybrid(runner, prefix_cache) -> None:
    """Each request has nine blocks for states. With the prefix cache, vLLM ends steps there."""
    check_feature(
        LONG,
        shape="granite-4.0-h-tiny",
        blocks=57,
        runner=runner,
        prefix_cache=prefix_cache,
        max_model_len=1000,
    )
