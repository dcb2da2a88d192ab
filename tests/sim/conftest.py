"""Small scenarios for the tests."""

from collections.abc import Callable
from typing import Any

import pytest

from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios

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


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """A small scenario with changed fields, given with `__` for the dot."""

    def make(**changes: Any) -> Scenario:
        fields = {name.replace("__", "."): value for name, value in changes.items()}
        return parse_scenarios(SMALL, "test", fields)[0]

    return make
