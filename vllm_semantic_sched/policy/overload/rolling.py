"""Counts and percentiles of a value over a rolling window, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

# Neighbouring buckets differ by a tenth: percentiles are right within 5 %.
_GROWTH = 1.1
_LOWEST = 1e-4
_HIGHEST = 1e5
_SLOTS = 12


@dataclass(slots=True)
class _Slot:
    """What happened in a twelfth of the window."""

    number: int
    buckets: Counter[int] = field(default_factory=Counter)
    met: int = 0


class RollingValues:
    """Values of the last `window` seconds: how many, how many met a target, and percentiles.

    Values are counted in buckets of growing width (a histogram with a relative error of 5 %)
    from 0.1 ms to 28 h, in twelve slots of the window. Memory is bounded by the number of buckets
    whatever the number of values; adding is O(1).

    Args:
        window: seconds. What is counted is the last 11/12 to 12/12 of it.
    """

    def __init__(self, window: float) -> None:
        self._slot_seconds = window / _SLOTS
        self._slots: deque[_Slot] = deque()
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.met = 0

    def add(self, value: float, met: bool, now: float) -> None:
        """Count a value, and whether it met its target."""
        self.advance(now)
        number = self._number(now)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
        slot = self._slots[-1]  # a clock that stepped back counts in the latest slot
        bucket = _bucket(value)
        slot.buckets[bucket] += 1
        slot.met += met
        self._buckets[bucket] += 1
        self.count += 1
        self.met += met

    def advance(self, now: float) -> None:
        """Forget what has left the window."""
        oldest = self._number(now) - _SLOTS
        while self._slots and self._slots[0].number <= oldest:
            slot = self._slots.popleft()
            self._buckets -= slot.buckets
            self.count -= slot.buckets.total()
            self.met -= slot.met

    def percentile(self, percent: float) -> float | None:
        """The value that `percent` of the values do not exceed; None if there are none.
        O(buckets log buckets), at most a few hundred."""
        wanted = math.ceil(self.count * percent / 100)
        for bucket in sorted(self._buckets):
            wanted -= self._buckets[bucket]
            if wanted <= 0:
                return _value(bucket)
        return None

    def _number(self, now: float) -> int:
        return math.floor(now / self._slot_seconds)


def _bucket(value: float) -> int:
    return math.floor(math.log(min(max(value, _LOWEST), _HIGHEST)) / math.log(_GROWTH))


def _value(bucket: int) -> float:
    return math.exp((bucket + 0.5) * math.log(_GROWTH))
