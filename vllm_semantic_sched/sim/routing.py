"""Routes requests to several engines."""

from __future__ import annotations

from typing import Literal

Routing = Literal["round_robin", "least_loaded", "urgency_aware"]


class Router:
    """Assigns each arriving request to one of several independent engines.

    `round_robin`: each engine in turn. `least_loaded`: the engine with the fewest requests.
    `urgency_aware`: the engine with the fewest requests that are at least as urgent, because a
    request waits for those; ties go to the engine with the fewest requests in total. The level
    is the one known at arrival: the hint, or the default level. Remaining ties go to the first
    engine.

    Args:
        engines, levels: numbers of engines and levels.
    """

    def __init__(self, routing: Routing, engines: int, levels: int) -> None:
        self._routing = routing
        self._loads = [[0] * levels for _ in range(engines)]
        self._turn = -1

    def choose(self, level: int) -> int:
        """Choose an engine for a request of this level, and count the request there."""
        chosen = self._chosen(level)
        self._loads[chosen][level] += 1
        return chosen

    def leave(self, engine: int, level: int) -> None:
        """Forget a finished request that `choose` sent there at this level."""
        self._loads[engine][level] -= 1

    def _chosen(self, level: int) -> int:
        engines = range(len(self._loads))
        if self._routing == "round_robin":
            self._turn = (self._turn + 1) % len(self._loads)
            return self._turn
        if self._routing == "least_loaded":
            return min(engines, key=lambda engine: sum(self._loads[engine]))
        return min(
            engines,
            key=lambda engine: (sum(self._loads[engine][: level + 1]), sum(self._loads[engine])),
        )
