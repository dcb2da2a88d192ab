"""Speculative decoding on the emulated device: steps verify drafts, some of which are wrong."""

from typing import Any

import pytest
from virtual_runs import check_feature, decodes_beside_a_prefill

pytestmark = pytest.mark.engine


def check_drafts(**options: Any) -> None:
    for shown in check_feature(**options):
        assert shown.accepted > 0


def test_ngram() -> None:
    """vLLM runs it without asynchronous scheduling."""
    check_drafts(drafts=2, drafter="ngram", runner=2, asynchronous=False, modes=[False])


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_ngram_on_the_device(prefix_cache) -> None:
    check_drafts(drafts=2, drafter="ngram_gpu", runner=2, prefix_cache=prefix_cache)


def test_suffix_decoding(monkeypatch) -> None:
    """vLLM runs it on its first model runner, without asynchronous scheduling. Its package is not
    installed: the device drafts none to five tokens."""
    monkeypatch.setattr("vllm.config.speculative.has_arctic_inference", lambda: True)
    check_drafts(drafts=5, drafter="suffix", asynchronous=False, modes=[False], holds=False)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_eagle(prefix_cache) -> None:
    check_drafts(drafts=3, drafter="eagle", runner=2, prefix_cache=prefix_cache)


def test_eagle3() -> None:
    check_drafts(drafts=3, drafter="eagle3", runner=2, prefix_cache=True)


def test_draft_model() -> None:
    check_drafts(drafts=3, drafter="draft_model", runner=2, prefix_cache=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_go_on_beside_a_long_prefill(asynchronous) -> None:
    """16 decodes with two drafts each take 48 of 64 tokens."""
    options = {"drafts": 2, "acceptance": 0.0, "runner": 2, "asynchronous": asynchronous}
    decodes = decodes_beside_a_prefill(16, budget=64, **options)
    assert sum(count < 16 for count in decodes) <= 1
    assert len(decodes) <= 64


@pytest.mark.parametrize("asynchronous", [False, True])
def test_draft_model_leaves_decodes_their_tokens(asynchronous) -> None:
    """It takes one token of a step more for each request: 16 decodes take 64 of 96."""
    options = {"drafts": 2, "acceptance": 0.0, "runner": 2, "asynchronous": asynchronous}
    decodes = decodes_beside_a_prefill(16, budget=96, drafter="draft_model", **options)
    assert sum(count < 16 for count in decodes) <= 1
    assert len(decodes) <= 34


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_mtp(prefix_cache) -> None:
    """By a layer of the model itself."""
    check_drafts(
        shape="deepseek-v3.2",
        drafts=1,
        drafter="mtp",
        runner=2,
        prefix_cache=prefix_cache,
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_nobody_is_held_on_the_first_model_runner(prefix_cache) -> None:
    """It would lose the drafts of a request that sits out a step."""
    shown = check_feature(drafts=2, drafter="eagle", holds=False, prefix_cache=prefix_cache)
    assert not any(one.held for one in shown)
    assert all(one.accepted for one in shown)


def test_hybrid_model() -> None:
    check_drafts(shape="granite-4.0-h-tiny", blocks=57, drafts=2, drafter="ngram_gpu", runner=2)
