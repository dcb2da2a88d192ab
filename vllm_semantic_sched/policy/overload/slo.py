"""Measures over a rolling window whether each tier gets its SLO."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddsketch import LogCollapsingLowestDenseDDSketch

from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.lately import SlidingWindow

MEASURES = ("ttft", "tpot", "e2e")  # latencies that an SLO may state, see `tiers.Slo`
_RELATIVE_ACCURACY = 0.02
_MOST_BINS = 600  # hold values from 0.1 ms to 28 h at this accuracy
_SLOTS = 12


_make_sketch: Callable[[], Any] = partial(
    LogCollapsingLowestDenseDDSketch, _RELATIVE_ACCURACY, _MOST_BINS
)


class _Slot:
    """Values of a twelfth of the window."""

    def __init__(self) -> None:
        self.count = self.met = 0
        self.sketch = _make_sketch()


class RollingValues:
    """Values of the last 11/12 to 12/12 of `window` seconds: their number, how many met a target,
    and percentiles. Each of the twelve slots has a DDSketch, so that memory is bounded."""

    def __init__(self, window: float) -> None:
        self._slots = SlidingWindow(window, _SLOTS, _Slot)
        self._earlier: Any = None  # merged sketch of all slots but the newest; None if outdated
        self.count = self.met = 0

    def add(self, value: float, met: bool, now: float) -> None:
        """Count a value, and whether it met its target."""
        self.advance(now)
        slot, is_new = self._slots.newest(now)
        if is_new:
            self._earlier = None
        slot.sketch.add(value)
        slot.count += 1
        slot.met += met
        self.count += 1
        self.met += met

    def advance(self, now: float) -> None:
        """Drop the slots that have left the window."""
        for slot in self._slots.advance(now):
            self._earlier = None
            self.count -= slot.count
            self.met -= slot.met

    def percentile(self, percent: float) -> float | None:
        """The smallest value that at least `percent` of the values do not exceed, within 2 %;
        None without values. O(bins), and O(slots x bins) once per slot."""
        if not self.count:
            return None
        *earlier, newest = self._slots
        if self._earlier is None:
            self._earlier = _make_sketch()
            for slot in earlier:
                self._earlier.merge(slot.sketch)
        sketch = _make_sketch()
        sketch.merge(self._earlier)
        sketch.merge(newest.sketch)
        # The library counts ranks from 0 to count - 1 and rounds down.
        rank = math.ceil(self.count * percent / 100) - 0.5
        value: float = sketch.get_quantile_value(min(1.0, rank / max(1, self.count - 1)))
        return value


def targets(slo: Slo) -> dict[str, float]:
    """The SLOs by measure, seconds; empty if no level has an SLO."""
    return slo.model_dump(include={*MEASURES}, exclude_none=True)


class SloMonitor:
    """Compliance and headroom of each level, whose tier has an SLO, over a window of seconds."""

    def __init__(self, ref: PolicyRef, window: float) -> None:
        self._ref = ref
        # Measured seconds of each level, with an SLO or without.
        self.values = [
            {measure: RollingValues(window) for measure in MEASURES}
            for _ in range(ref.policy.levels)
        ]
        self._targets = Derived(
            ref, lambda policy: [targets(tier.slo) for tier in policy.all_tiers]
        )

    @property
    def targets(self) -> Sequence[dict[str, float]]:
        """The SLOs of each level. Values in the window keep their old ones."""
        return self._targets.table

    def _percentile(self, level: int) -> float:
        return self._ref.policy.all_tiers[level].slo.percentile

    def record(self, level: int, now: float, **latencies: float | None) -> None:
        """Record latencies of a request in seconds by measure, each once. O(1)."""
        for measure, seconds in latencies.items():
            if seconds is not None:
                met = seconds <= self.targets[level].get(measure, math.inf)
                self.values[level][measure].add(seconds, met, now)

    def advance(self, now: float) -> None:
        """Drop the values that have left the window."""
        for level in self.values:
            for values in level.values():
                if values.count:
                    values.advance(now)

    def compliance(self, level: int) -> float | None:
        """Smallest share of requests that met their target, over the measures with an SLO. None
        without an SLO or values."""
        measured = map(self.values[level].__getitem__, self.targets[level])
        return min((values.met / values.count for values in measured if values.count), default=None)

    def headroom(self, level: int) -> float | None:
        """Smallest relative distance of the SLO's percentile below its target, over the
        measures with an SLO. Negative if an SLO is missed, None without an SLO or values."""
        values, percent = self.values[level], self._percentile(level)
        rooms = (
            1.0 - observed / target
            for measure, target in self.targets[level].items()
            if (observed := values[measure].percentile(percent)) is not None
        )
        return min(rooms, default=None)

    def meets_slo(self, level: int, enough: int = 1) -> bool | None:
        """Whether compliance reaches the SLO's percentage; None if no measure with an SLO has
        `enough` values."""
        share = self.compliance(level)
        counts = (self.values[level][measure].count for measure in self.targets[level])
        if share is None or max(counts) < enough:
            return None
        return share * 100 >= self._percentile(level)
