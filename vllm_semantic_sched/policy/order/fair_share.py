"""Weighted fair share of the engine's time by tier, with deficit boost."""

from collections.abc import Sequence

from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.config.tiers import target_shares
from vllm_semantic_sched.policy.facts.lately import Decayed

_WINDOW = 20.0  # seconds, time constant of the exponential decay of past use: tens of answers
# Levels that a tier gains below its share or loses above it. Under saturation shares are reached
# only if gain and loss together bridge the gap between levels: four levels, as far as 0 from 4.
MOST_LEVELS = 2.0
_TOLERANCE = 0.1  # relative distance from the share at which the full gain or loss applies


class FairShare:
    """Recent engine time of each tier, and the level offset that follows from it. Shares are
    relative to the tiers with waiting requests, so that the engine never idles for one."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self._targets = Derived(ref, lambda policy: target_shares(policy.all_tiers))
        levels = ref.policy.levels
        self.served = [0.0] * levels  # engine seconds charged to each tier since the start
        self.offsets = [0.0] * levels  # levels to add by tier; negative is sooner
        self._used = Decayed(levels)  # engine seconds
        self._last: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether the policy in force corrects shares; engine time is counted either way."""
        return self._ref.policy.fair_share.enabled

    @property
    def targets(self) -> Sequence[float]:
        """Target share of each tier."""
        return self._targets.table

    def reset(self) -> None:
        """Drop the offsets until the next step: they are by another policy."""
        self.offsets = [0.0] * len(self.served)

    def charge(self, level: int, seconds: float) -> None:
        """Charge engine time to a tier; negative to refund."""
        self.served[level] += seconds
        self._used.add(level, seconds)

    def update(self, now: float, active: Sequence[int]) -> None:
        """Update the offsets, once per step; `active`: tiers with waiting requests. O(tiers)."""
        if self._last is not None and now > self._last:
            self._used.age(now - self._last, _WINDOW)
        self._last = now
        self.reset()
        if self.enabled:
            for level, (share, target) in self.shares(active).items():
                self.offsets[level] = self._offset(share, target)

    def shares(self, active: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Recent share and target share of the tiers in `active`; empty if they used nothing."""
        targets, sums = self.targets, self._used.sums
        used = sum(sums[level] for level in active)
        wanted = sum(targets[level] for level in active)
        if used <= 0.0 or wanted <= 0.0:
            return {}
        return {level: (sums[level] / used, targets[level] / wanted) for level in active}

    def _offset(self, share: float, target: float) -> float:
        if target <= 0.0:  # behind all tiers with a share
            return MOST_LEVELS
        excess = (share - target) / (target * _TOLERANCE)
        return MOST_LEVELS * min(1.0, max(-1.0, excess))
