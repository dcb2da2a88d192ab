"""vLLM's API servers: their authentication, and the engines behind them."""

from __future__ import annotations

import sys
from typing import Any

from starlette.datastructures import Headers
from vllm.config import VllmConfig

RANK = "data_parallel_rank"
"""Argument of the engine client's `generate`: the number of the engine; None: vLLM chooses. vLLM
fills it from the header X-data-parallel-rank."""

_DEEPEST = 32  # layers of middleware


class Unauthorized:
    """Tells requests that vLLM's own authentication, inside the middleware that users name, would
    refuse. `app`: the next layer of the server's middleware."""

    def __init__(self, app: Any) -> None:
        self._layer = app
        for _ in range(_DEEPEST):
            if hasattr(self._layer, "verify_token"):
                break
            self._layer = getattr(self._layer, "app", None)
        else:
            self._layer = None
        module = sys.modules.get(type(self._layer).__module__)
        self._guarded: str = getattr(module, "GUARDED_PREFIX", "/v1")

    def __call__(self, scope: Any) -> bool:
        """Whether vLLM refuses a request, by its headers; never where the server has no key."""
        if self._layer is None or scope["type"] != "http" or scope["method"] == "OPTIONS":
            return False
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return path.startswith(self._guarded) and not self._layer.verify_token(Headers(scope=scope))


def engine_count(vllm_config: VllmConfig) -> int:
    """Engines among which an API server can choose; vLLM numbers them from 0 on."""
    parallel = vllm_config.parallel_config
    if parallel.local_engines_only:
        return parallel.data_parallel_size_local
    return parallel.data_parallel_size


def api_server_count(vllm_config: VllmConfig) -> int:
    """API servers that send requests to the engines."""
    return vllm_config.parallel_config._api_process_count


def api_server_rank(vllm_config: VllmConfig) -> int:
    """This API server's number among them, from 0 on."""
    return vllm_config.parallel_config._api_process_rank


def shares_host(vllm_config: VllmConfig) -> bool:
    """Whether this engine is one of several of a server. vLLM tells the engines of dense models
    that they are alone, in all fields but this one."""
    parallel = vllm_config.parallel_config
    return max(parallel.data_parallel_size, parallel.elastic_ep_max_dp_size) > 1
