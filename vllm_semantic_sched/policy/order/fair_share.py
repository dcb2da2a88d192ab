"""Weighted fair share of the engine's time by tier, with deficit boost."""

import math
from collections.abc import Sequence

from vllm_semantic_sched.policy.config.order import FairShareKnobs
from vllm_semantic_sched.policy.config.tiers import Tier, target_shares

_TOLERANCE = 0.1  # relative distance from the share at which the full gain or loss applies


class FairShare:
    """Recent engine time of each tier, and the level offset that follows from it. Shares are
    relative to the tiers with waiting requests, so that the engine never idles for one."""

    def __init__(self, knobs: FairShareKnobs, tiers: Sequence[Tier]) -> None:
        self.adopt(knobs, tiers)
        self.served = [0.0] * len(tiers)  # engine seconds charged to each tier since the start
        self._used = [0.0] * len(tiers)
        self._last: float | None = None

    def adopt(self, knobs: FairShareKnobs, tiers: Sequence[Tier]) -> None:
        """Switch to new settings for the same number of tiers."""
        self.knobs, self.targets = knobs, target_shares(tiers)
        self.offsets = [0.0] * len(tiers)  # levels to add by tier; negative is sooner

    def charge(self, level: int, seconds: float) -> None:
        """Charge engine time to a tier; negative to refund."""
        self.served[level] += seconds
        self._used[level] = max(0.0, self._used[level] + seconds)

    def update(self, now: float, active: Sequence[int]) -> None:
        """Update the offsets, once per step; `active`: tiers with waiting requests. O(tiers)."""
        if self._last is not None and now > self._last:
            kept = math.exp((self._last - now) / self.knobs.window)
            self._used = [kept * used for used in self._used]
        self._last = now
        self.offsets = [0.0] * len(self._used)
        if self.knobs.enabled:
            for level, (share, target) in self.shares(active).items():
                self.offsets[level] = self._offset(share, target)

    def shares(self, active: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Recent share and target share of the tiers in `active`; empty if they used nothing."""
        used = sum(self._used[level] for level in active)
        targets = sum(self.targets[level] for level in active)
        if used <= 0.0 or targets <= 0.0:
            return {}
        return {at: (self._used[at] / used, self.targets[at] / targets) for at in active}

    def _offset(self, share: float, target: float) -> float:
        if target <= 0.0:  # behind all tiers with a share
            return self.knobs.max_levels
        excess = (share - target) / (target * _TOLERANCE)
        return self.knobs.max_levels * min(1.0, max(-1.0, excess))
