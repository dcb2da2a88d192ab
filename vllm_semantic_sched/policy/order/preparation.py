"""The order in which an HTTP server prepares requests for the engine: parse, template, tokenize."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

_Ticket = TypeVar("_Ticket")

# A request goes before all that are a level less urgent and came at most this much earlier, in
# seconds. Bounded, so that nobody starves; larger than the backlog of a burst.
_HEAD_START = 1.0


class PreparationQueue(Generic[_Ticket]):
    """Lets a few requests at a time be prepared, the most urgent first. Every step is O(log n).

    Args:
        slots: requests that are prepared at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: list[tuple[float, int, _Ticket]] = []
        self._count = itertools.count()

    def __len__(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    def enter(self, ticket: _Ticket, level: int, now: float) -> bool:
        """Add a request; whether it gets a slot at once. If not, `leave` will return its ticket."""
        if self._free:
            self._free -= 1
            return True
        due = now + level * _HEAD_START
        heapq.heappush(self._waiting, (due, next(self._count), ticket))
        return False

    def leave(self) -> _Ticket | None:
        """A slot is free again. The ticket that gets it; None if nobody waits."""
        if self._waiting:
            return heapq.heappop(self._waiting)[-1]
        self._free += 1
        return None
