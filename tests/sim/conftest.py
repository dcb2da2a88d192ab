"""Small scenarios for the tests."""

from collections.abc import Callable
from typing import Any

import pytest
from small_scenario import SMALL

from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios


@pytest.fixture
def scenario() -> Callable[..., Scenario]:
    """A small scenario with changed fields, given with `__` for the dot."""

    def make(**changes: Any) -> Scenario:
        fields = {name.replace("__", "."): value for name, value in changes.items()}
        return parse_scenarios(SMALL, "test", fields)[0]

    return make
