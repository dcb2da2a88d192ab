"""What happened lately: sums that decay, and a sliding window. Time is what the owner counts:
seconds, busy seconds or requests."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Decayed:
    """Sums over the same past, in which a part of age `constant` counts 1/e of a new one."""

    __slots__ = ("sums",)

    def __init__(self, count: int) -> None:
        self.sums = [0.0] * count

    def age(self, passed: float, constant: float) -> None:
        """Let time pass."""
        kept = math.exp(-passed / constant)
        self.sums = [kept * total for total in self.sums]

    def add(self, place: int, amount: float) -> None:
        """Add to a sum; it never falls below 0."""
        self.sums[place] = max(0.0, self.sums[place] + amount)


class SlidingWindow(Generic[T]):
    """Records of the last `window`, in so many slots: what is counted is the last (slots - 1) /
    slots to all of it. Times may step back: the newest slot stays the newest."""

    def __init__(self, window: float, slots: int, make: Callable[[], T]) -> None:
        self._slot = window / slots
        self._count = slots
        self._make = make
        self._slots: deque[tuple[int, T]] = deque()  # number, record

    def __iter__(self) -> Iterator[T]:
        """The records, oldest first."""
        return (record for _, record in self._slots)

    def advance(self, now: float) -> list[T]:
        """Drop the slots that have left the window, and return their records."""
        dropped, oldest = [], math.floor(now / self._slot) - self._count
        while self._slots and self._slots[0][0] <= oldest:
            dropped.append(self._slots.popleft()[1])
        return dropped

    def newest(self, now: float) -> tuple[T, bool]:
        """The record to add to, and whether it is a new one; call `advance` before."""
        number = math.floor(now / self._slot)
        if self._slots and self._slots[-1][0] >= number:
            return self._slots[-1][1], False
        record = self._make()
        self._slots.append((number, record))
        return record, True
