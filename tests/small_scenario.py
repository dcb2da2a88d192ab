"""A scenario that takes a moment to simulate."""

from typing import Any

SMALL: dict[str, Any] = {
    "workload": {
        "arrivals": "poisson",
        "requests": 60,
        "rate": 8.0,
        "prompt": {"kind": "uniform", "low": 1, "high": 200},
        "output": {"kind": "uniform", "low": 1, "high": 80},
    },
    "engine": {"kind": "vllm", "seats": 4, "kv_blocks": 60, "token_budget": 128},
    "schedulers": {"semantic": {"policy": "ems"}},
}
