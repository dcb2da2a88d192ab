"""Context parallelism: the ranks share the tokens of a block. The emulated device stands for all of
them, with one scheduler as in vLLM."""

from typing import Any

import pytest
from virtual_runs import check_feature
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore

from vllm_semantic_sched.engine.kv.connector import why_config_unsupported
from vllm_semantic_sched.lab.device import virtual

pytestmark = pytest.mark.engine


@pytest.fixture(params=[(2, 1), (2, 2)], ids=["decode", "decode and prefill"])
def ranks(monkeypatch, request) -> None:
    """To vLLM's core and our scheduler; there is one worker."""

    def core(config: VllmConfig, *args: Any, **options: Any) -> EngineCore:
        decode, prefill = request.param
        config.parallel_config.decode_context_parallel_size = decode
        config.parallel_config.prefill_context_parallel_size = prefill
        return EngineCore(config, *args, **options)

    monkeypatch.setattr(virtual, "EngineCore", core)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_get_the_same_answers(ranks, prefix_cache) -> None:
    for shown in check_feature(blocks=34, runner=2, prefix_cache=prefix_cache):
        scheduler = shown.engine.scheduler
        assert scheduler.block_size == 2 * shown.engine.config.block_size
        assert why_config_unsupported(scheduler.vllm_config) == "context parallelism is on"
