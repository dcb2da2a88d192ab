"""The order in which an HTTP server prepares requests for the engine: parse, template, tokenize."""

import heapq
import itertools
from collections import Counter
from typing import Generic, TypeVar

_Ticket = TypeVar("_Ticket")

# A request goes before all that are a level less urgent and came at most this much earlier, in
# seconds. Bounded, so that nobody starves; larger than the backlog of a burst.
_HEAD_START = 1.0
# A request goes behind those that came up to this much later, in seconds, for each request of its
# own tenant that waits already: a flood of one tenant holds nobody else up.
_TURN = 0.1


class PreparationQueue(Generic[_Ticket]):
    """Lets so many requests (`slots`) at a time be prepared, the most urgent first. Every step is
    O(log n); `len` counts those that wait."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: list[tuple[float, int, str, _Ticket]] = []
        self._of_tenant: Counter[str] = Counter()
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, ticket: _Ticket, level: int, now: float, tenant: str = "") -> bool:
        """Add a request; whether it gets a slot at once. If not, `leave` will return its ticket.
        One of an unknown (empty) tenant waits for none of its own."""
        if self._free:
            self._free -= 1
            return True
        due = now + level * _HEAD_START
        if tenant:
            due += _TURN * self._of_tenant[tenant]
            self._of_tenant[tenant] += 1
        heapq.heappush(self._waiting, (due, next(self._count), tenant, ticket))
        return False

    def leave(self) -> _Ticket | None:
        """A slot is free again. The ticket that gets it; None if nobody waits."""
        if not self._waiting:
            self._free += 1
            return None
        _, _, tenant, ticket = heapq.heappop(self._waiting)
        if tenant:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
        return ticket
