"""Sheds tiers while promises to others are broken, with hysteresis."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_semantic_sched.policy.config.overload import Shedding
from vllm_semantic_sched.policy.facts.tiers import Tier

_LONGEST_RECOVERY = 8  # times `recover`

ESCALATE = 1.0
"""Fewest seconds between shedding one tier and the next."""


class Shedder:
    """Decides which tiers are shed, one step up or down at a time.

    Attributes:
        stage: number of tiers' shed orders in force; 0: nothing is shed.
    """

    def __init__(self) -> None:
        self.stage = 0
        self._changed = float("-inf")
        self._kept_since: float | None = None
        self._calm_since: float | None = None
        self._patience = 1

    def is_shed(self, tier: Tier, tiers: Sequence[Tier]) -> bool:
        """Whether new requests of a tier are refused."""
        return self.stage > 0 and tier.shed_order in _orders(tiers)[: self.stage]

    def benefits(self, tier: Tier, tiers: Sequence[Tier]) -> bool:
        """Whether a tier would stay in service if one more step were taken."""
        return tier.shed_order not in _orders(tiers)[: self.stage + 1]

    def observe(
        self, broken: bool, calm: bool, rules: Shedding, tiers: Sequence[Tier], now: float
    ) -> None:
        """Take a step if it is due.

        Args:
            broken: whether a promise to a tier that would stay is broken.
            calm: whether the engine has no pressure and few requests wait.
        """
        steps = len(_orders(tiers)) if rules.enabled else 0
        self.stage = min(self.stage, steps)
        if calm:
            self._calm_since = now if self._calm_since is None else self._calm_since
        else:
            self._calm_since = None
        if self._calm_since is not None and now - self._calm_since >= rules.recover:
            self.stage, self._patience, self._kept_since = 0, 1, None
        elif broken:
            self._kept_since = None
            if self.stage < steps and now - self._changed >= ESCALATE:
                self._step_up(rules, now)
        elif self.stage:
            self._kept_since = now if self._kept_since is None else self._kept_since
            if now - self._kept_since >= rules.recover * self._patience:
                self.stage -= 1
                self._changed, self._kept_since = now, None

    def _step_up(self, rules: Shedding, now: float) -> None:
        since = now - self._changed
        if since < 4 * rules.recover and self.stage == 0:  # too early
            self._patience = min(2 * self._patience, _LONGEST_RECOVERY)
        elif since > 4 * rules.recover * _LONGEST_RECOVERY:
            self._patience = 1
        self.stage += 1
        self._changed = now


def _orders(tiers: Sequence[Tier]) -> list[int]:
    return sorted({tier.shed_order for tier in tiers if tier.shed_order is not None})
