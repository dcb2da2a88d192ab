"""Measures over a rolling window whether each tier gets its promised latency."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from ddsketch import LogCollapsingLowestDenseDDSketch

from vllm_semantic_sched.policy.facts.tiers import Tier

MEASURES = ("ttft", "tpot", "e2e")
"""Latencies that can be promised, see `tiers.Slo`."""

_RELATIVE_ACCURACY = 0.02
_MOST_BINS = 600  # hold values from 0.1 ms to 28 h at this accuracy
_SLOTS = 12


class _Slot:
    """Values of a twelfth of the window."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = self.met = 0
        self.sketch = _make_sketch()


def _make_sketch() -> Any:
    return LogCollapsingLowestDenseDDSketch(_RELATIVE_ACCURACY, _MOST_BINS)


class RollingValues:
    """Values of the last `window` seconds: their number, how many met a target, and percentiles.

    Each of the twelve slots has a DDSketch with a relative accuracy of 2 %, so memory is bounded.
    Adding a value is O(1).

    Args:
        window: seconds. The values cover the last 11/12 to 12/12 of it.
    """

    def __init__(self, window: float) -> None:
        self._slot_seconds = window / _SLOTS
        self._slots: deque[_Slot] = deque()
        self._earlier: Any = None  # merged sketch of all slots but the newest; None if outdated
        self.count = 0
        self.met = 0

    def add(self, value: float, met: bool, now: float) -> None:
        """Count a value, and whether it met its target."""
        self.advance(now)
        number = self._slot_number(now)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_Slot(number))
            self._earlier = None
        slot = self._slots[-1]  # the newest slot, even after the clock has stepped back
        slot.sketch.add(value)
        slot.count += 1
        slot.met += met
        self.count += 1
        self.met += met

    def advance(self, now: float) -> None:
        """Drop the slots that have left the window."""
        oldest = self._slot_number(now) - _SLOTS
        while self._slots and self._slots[0].number <= oldest:
            slot = self._slots.popleft()
            self._earlier = None
            self.count -= slot.count
            self.met -= slot.met

    def percentile(self, percent: float) -> float | None:
        """The smallest value that at least `percent` of the values do not exceed, within 2 %;
        None without values. O(bins), and O(slots x bins) once per slot."""
        if not self.count:
            return None
        if self._earlier is None:
            self._earlier = _make_sketch()
            for slot in list(self._slots)[:-1]:
                self._earlier.merge(slot.sketch)
        sketch = _make_sketch()
        sketch.merge(self._earlier)
        sketch.merge(self._slots[-1].sketch)
        # The library counts ranks from 0 to count - 1 and rounds down.
        rank = math.ceil(self.count * percent / 100) - 0.5
        value: float = sketch.get_quantile_value(min(1.0, rank / max(1, self.count - 1)))
        return value

    def _slot_number(self, now: float) -> int:
        return math.floor(now / self._slot_seconds)


class SloMonitor:
    """Compliance and headroom of each level over a rolling window.

    Args:
        tiers: one per level, with its promises.
        window: seconds.
    """

    def __init__(self, tiers: Sequence[Tier], window: float) -> None:
        self._tiers = tuple(tiers)
        self._values = [{m: RollingValues(window) for m in MEASURES} for _ in self._tiers]

    def adopt(self, tiers: Sequence[Tier]) -> None:
        """Switch to new promises. Values in the window keep their old targets."""
        self._tiers = tuple(tiers)

    def record(
        self,
        level: int,
        ttft: float | None = None,
        tpot: float | None = None,
        e2e: float | None = None,
        *,
        now: float,
    ) -> None:
        """Record latencies of a request in seconds, each once. O(1)."""
        for measure, value in zip(MEASURES, (ttft, tpot, e2e), strict=True):
            if value is not None:
                target = self.target(level, measure)
                met = target is None or value <= target
                self._values[level][measure].add(value, met, now)

    def advance(self, now: float) -> None:
        """Drop the values that have left the window."""
        for values in self._values:
            for value in values.values():
                if value.count:
                    value.advance(now)

    def target(self, level: int, measure: str) -> float | None:
        """Promised seconds; None without a promise."""
        target: float | None = getattr(self._tiers[level].slo, measure)
        return target

    def promises(self, level: int) -> bool:
        """Whether a tier has any promise."""
        return bool(self._promised(level))

    def samples(self, level: int) -> int:
        """Largest number of values in the window over the promised measures."""
        return max((self._values[level][m].count for m in self._promised(level)), default=0)

    def compliance(self, level: int) -> float | None:
        """Smallest share of requests that met their target, over the promised measures. None
        without promises or values."""
        shares = [
            values.met / values.count
            for values in (self._values[level][m] for m in self._promised(level))
            if values.count
        ]
        return min(shares, default=None)

    def headroom(self, level: int) -> float | None:
        """Smallest relative distance of the promised percentile below its target, over the
        promised measures. Negative if a promise is broken, None without promises or values."""
        percent = self._tiers[level].slo.percentile
        rooms = []
        for measure in self._promised(level):
            target = self.target(level, measure)
            observed = self.percentile(level, measure, percent)
            if target is not None and observed is not None:
                rooms.append(1.0 - observed / target)
        return min(rooms, default=None)

    def percentile(self, level: int, measure: str, percent: float) -> float | None:
        """Percentile of a measure in seconds, see `RollingValues.percentile`."""
        return self._values[level][measure].percentile(percent)

    def keeps_promise(self, level: int, enough: int = 1) -> bool | None:
        """Whether compliance reaches the promised percentage; None with fewer than `enough`
        values."""
        share = self.compliance(level)
        if share is None or self.samples(level) < enough:
            return None
        return share * 100 >= self._tiers[level].slo.percentile

    def _promised(self, level: int) -> list[str]:
        return [measure for measure in MEASURES if self.target(level, measure) is not None]
