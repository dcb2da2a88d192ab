"""Data parallelism: several engines behind vLLM's API servers."""

from __future__ import annotations

from vllm.config import VllmConfig

RANK = "data_parallel_rank"
"""Argument of the engine client's `generate`: the number of the engine; None: vLLM chooses. vLLM
fills it from the header X-data-parallel-rank."""


def engine_count(vllm_config: VllmConfig) -> int:
    """Engines among which an API server can choose; vLLM numbers them from 0 on."""
    parallel = vllm_config.parallel_config
    local: int = parallel.data_parallel_size_local
    count: int = parallel.data_parallel_size
    return local if parallel.local_engines_only else count


def api_server_count(vllm_config: VllmConfig) -> int:
    """API servers that send requests to the engines."""
    count: int = vllm_config.parallel_config._api_process_count
    return count


def api_server_rank(vllm_config: VllmConfig) -> int:
    """This API server's number among them, from 0 on."""
    rank: int = vllm_config.parallel_config._api_process_rank
    return rank


def shares_host(vllm_config: VllmConfig) -> bool:
    """Whether this engine is one of several of a server. vLLM tells the engines of dense models
    that they are alone, in all fields but this one."""
    parallel = vllm_config.parallel_config
    return max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size) > 1
