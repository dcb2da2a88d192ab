"""Which of several engines a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Routing = Literal["round_robin", "least_loaded", "urgency_aware"]


class Router:
    """Sends each arriving request to one of several independent engines, and leaves it there.

    `round_robin`: each engine in turn. `least_loaded`: the engine with the fewest requests.
    `urgency_aware`: the engine with the fewest requests that are at least as urgent, as those are
    what a request waits for; the fewest in all where that is equal. What is known of a request
    when it arrives counts: its hint, or the default level. Equal engines are taken in order.

    Args:
        engines, levels: how many.
    """

    def __init__(self, routing: Routing, engines: int, levels: int) -> None:
        self._routing = routing
        self._loads = [[0] * levels for _ in range(engines)]
        self._turn = -1

    def choose(self, level: int) -> int:
        """The engine for a request of that level, which counts as there from now on."""
        chosen = self._chosen(level)
        self._loads[chosen][level] += 1
        return chosen

    def leave(self, engine: int, level: int) -> None:
        """A request that was sent there as of that level is done."""
        self._loads[engine][level] -= 1

    @property
    def loads(self) -> Sequence[int]:
        """Requests at each engine."""
        return [sum(load) for load in self._loads]

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
