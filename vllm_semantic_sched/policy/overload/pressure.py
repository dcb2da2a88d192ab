"""Pressure on the engine's resources: none, warning or critical."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.overload import Pressure, Threshold

# Pressure falls once use has stayed for so many seconds this share below the mark that raised it.
CALM = 2.0
MARGIN = 0.1

_QUEUE = Threshold(warning=0.5, critical=0.9)
_STEP = Threshold(warning=0.8, critical=1.0)


class PressureLevel(enum.IntEnum):
    """Ordered: a higher level is worse."""

    NONE = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Use:
    """Use of each resource, relative to its limit; predicted need can exceed 1. 0: unlimited."""

    kv: float = 0.0  # blocks in use or predicted to be needed by running requests, the larger
    seats: float = 0.0  # running and waiting requests per seat
    queue: float = 0.0  # waiting requests, relative to `admission.queue`
    step: float = 0.0  # smoothed step time, relative to the shortest `tpot` promised to a tier


class PressureMonitor:
    """The pressure in force, which rises at once and falls with hysteresis."""

    def __init__(self) -> None:
        self.level = PressureLevel.NONE  # in force
        self.present = PressureLevel.NONE  # by the last observation alone
        self._below_since: float | None = None

    def observe(self, use: Use, rules: Pressure, now: float) -> PressureLevel:
        """Update with the present use; returns the level in force."""
        self.present = _level(use, rules, 1.0)
        if self.present > self.level:
            self.level, self._below_since = self.present, None
        elif (down := _level(use, rules, 1.0 - MARGIN)) < self.level:
            if self._below_since is None:
                self._below_since = now
            if now - self._below_since >= CALM:
                self.level, self._below_since = down, None
        else:
            self._below_since = None
        return self.level


def _level(use: Use, rules: Pressure, scale: float) -> PressureLevel:
    worst = PressureLevel.NONE
    for value, marks in (
        (use.kv, rules.kv),
        (use.seats, rules.seats),
        (use.queue, _QUEUE),
        (use.step, _STEP),
    ):
        if value >= marks.critical * scale:
            return PressureLevel.CRITICAL
        if value >= marks.warning * scale:
            worst = PressureLevel.WARNING
    return worst
