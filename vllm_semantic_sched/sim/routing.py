"""Routes requests to several engines."""

from __future__ import annotations

from typing import Literal

from vllm_semantic_sched.policy.placement import Placed, Placement

Routing = Literal["round_robin", "least_loaded", "urgency_aware"]


class Router:
    """Assigns each arriving request to one of several independent engines.

    `round_robin`: each engine in turn. `least_loaded`: the engine with the fewest requests.
    `urgency_aware`: the policy's `Placement`, which only counts requests at least as urgent.
    """

    def __init__(self, routing: Routing, engines: int, levels: int) -> None:
        self._routing = routing
        # With one level all requests are equally urgent.
        self._levels = levels if routing == "urgency_aware" else 1
        self._placement = Placement(engines, self._levels)
        self._turn = -1

    def choose(self, level: int) -> Placed:
        """Choose an engine for a request of this level, and count the request there."""
        level = min(level, self._levels - 1)
        if self._routing == "round_robin":
            self._turn = (self._turn + 1) % self._placement.engines
            return self._placement.count(self._turn, level)
        return self._placement.place(level)

    def leave(self, placed: Placed) -> None:
        """Forget a finished request that `choose` sent there."""
        self._placement.leave(placed)
