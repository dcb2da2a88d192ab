"""Watches whether each tier gets the latency that it was promised (S4)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_semantic_sched.policy.facts.tiers import Tier
from vllm_semantic_sched.policy.overload.rolling import RollingValues

MEASURES = ("ttft", "tpot", "e2e")
"""What can be promised: see `tiers.Slo`."""


class SloMonitor:
    """Compliance and headroom of each level over a rolling window.

    Args:
        tiers: one per level, with what it is promised.
        window: seconds.
    """

    def __init__(self, tiers: Sequence[Tier], window: float) -> None:
        self._tiers = tuple(tiers)
        self._values = [{m: RollingValues(window) for m in MEASURES} for _ in self._tiers]

    def adopt(self, tiers: Sequence[Tier]) -> None:
        """Promises have changed; what was counted under the old ones leaves with the window."""
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
        """Take in what a request got, in seconds; each measure once, when it is known. O(1)."""
        for measure, value in zip(MEASURES, (ttft, tpot, e2e), strict=True):
            if value is not None:
                target = self.target(level, measure)
                met = target is None or value <= target
                self._values[level][measure].add(value, met, now)

    def advance(self, now: float) -> None:
        """Time has passed: forget what has left the window."""
        for values in self._values:
            for value in values.values():
                value.advance(now)

    def target(self, level: int, measure: str) -> float | None:
        """Seconds promised; None if nothing is."""
        target: float | None = getattr(self._tiers[level].slo, measure)
        return target

    def promises(self, level: int) -> bool:
        """Whether a tier is promised anything."""
        return bool(self._promised(level))

    def samples(self, level: int) -> int:
        """Values of promised measures in the window; the largest number over the measures."""
        return max((self._values[level][m].count for m in self._promised(level)), default=0)

    def compliance(self, level: int) -> float | None:
        """Share of requests that met their target, 0 to 1: the smallest over the measures that
        are promised. None if nothing is promised or nothing was measured."""
        shares = [
            values.met / values.count
            for values in (self._values[level][m] for m in self._promised(level))
            if values.count
        ]
        return min(shares, default=None)

    def headroom(self, level: int) -> float | None:
        """How far the promised percentile is below its target, as a share of the target: the
        smallest over the measures; negative if the promise is broken. None as in `compliance`."""
        percent = self._tiers[level].slo.percentile
        rooms = []
        for measure in self._promised(level):
            target = self.target(level, measure)
            observed = self.percentile(level, measure, percent)
            if target is not None and observed is not None:
                rooms.append(1.0 - observed / target)
        return min(rooms, default=None)

    def percentile(self, level: int, measure: str, percent: float) -> float | None:
        """Seconds that `percent` of the values do not exceed, within 5 %; None if there are
        none."""
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
