"""The simulator's clock: events in a total order, no wall time, no threads."""

import enum
import heapq
import itertools
import math
from collections.abc import Callable


class Order(enum.IntEnum):
    """Order of simultaneous events: the engine is last, so a step sees all arrivals and predictions
    until then."""

    ARRIVAL = 0
    PREDICTOR = 1
    ENGINE = 2


class EventQueue:
    """Actions at moments of virtual time (`now`, in seconds), ordered by time, then `Order`, then
    the order of scheduling, so that runs are reproducible."""

    def __init__(self) -> None:
        self.now = 0.0  # may be moved on, by `quiet` at most
        self._heap: list[tuple[float, Order, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, order: Order, action: Callable[[], None]) -> None:
        """Schedule an action. ValueError if `time` has passed."""
        if time < self.now:
            raise ValueError(f"event at {time} s, but it is {self.now} s already")
        heapq.heappush(self._heap, (time, order, next(self._numbers), action))

    def advance(self, time: float) -> bool:
        """Move the clock to `time` unless an event comes first; returns whether it moved."""
        if self._heap and self._heap[0][0] <= time:
            return False
        self.now = time
        return True

    @property
    def quiet(self) -> float:
        """Seconds until the next event; inf if there is none."""
        return self._heap[0][0] - self.now if self._heap else math.inf

    def run(self) -> None:
        """Run until no event is left."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
