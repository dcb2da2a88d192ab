"""Weighted fair shares by tier: what a tier has of something, and what it is due."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.facts.lately import Decayed

_WINDOW = 20.0  # seconds, time constant of the exponential decay of past use: tens of answers
# Levels that a tier gains below its share or loses above it. Under saturation shares are reached
# only if gain and loss together bridge the gap between levels: four levels, as far as 0 from 4.
MOST_LEVELS = 2.0
_TOLERANCE = 0.1  # relative distance from the share at which the full gain or loss applies


class Share(NamedTuple):
    """What a tier has of what the tiers compared with it have, 0 to 1, and what it is due."""

    actual: float
    due: float


def shares_of(
    amounts: Sequence[float], targets: Sequence[float], active: Collection[int]
) -> Mapping[int, Share]:
    """Compare tiers with each other. What the others are due goes to those in `active`, in
    proportion, so that nothing is kept for a tier that does not ask for it. Empty if these have
    nothing, or are due nothing.

    Args:
        amounts: what each tier has, by level.
        targets: share of each in all, by level (`Policy.target_shares`).
    """
    total = sum(amounts[level] for level in active)
    due = sum(targets[level] for level in active)
    if total <= 0.0 or due <= 0.0:
        return {}
    return {level: Share(amounts[level] / total, targets[level] / due) for level in active}


class FairShare:
    """Recent engine time of each tier, and the level offset that follows from it: deficit boost."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self._used = Decayed(ref.policy.levels)  # engine seconds
        self._last: float | None = None
        self.reset()

    def reset(self) -> None:
        """Drop the offsets until the next step: they are by another policy."""
        # Levels to add by tier; negative is sooner.
        self.offsets = [0.0] * self._ref.policy.levels

    def charge(self, level: int, seconds: float) -> None:
        """Charge engine time to a tier; negative to refund."""
        self._used.add(level, seconds)

    def update(self, now: float, active: Collection[int]) -> None:
        """Update the offsets, once per step; `active`: tiers with waiting requests. O(tiers)."""
        if self._last is not None and now > self._last:
            self._used.age(now - self._last, _WINDOW)
        self._last = now
        self.reset()
        for level, share in self.shares(active).items():
            self.offsets[level] = _offset(share)

    def shares(self, active: Collection[int]) -> Mapping[int, Share]:
        """Shares in recent engine time of the tiers in `active`."""
        return shares_of(self._used.sums, self._ref.policy.target_shares, active)


def _offset(share: Share) -> float:
    if share.due <= 0.0:  # behind all tiers with a share
        return MOST_LEVELS
    excess = (share.actual - share.due) / (share.due * _TOLERANCE)
    return MOST_LEVELS * min(1.0, max(-1.0, excess))
