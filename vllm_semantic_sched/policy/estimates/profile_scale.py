"""Corrects an engine profile by measured steps of the running engine."""

from __future__ import annotations

import math

from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile

# A scale follows the engine with a memory of about 1/_RATE steps.
_RATE = 0.05
# Deviations are clipped to this logarithm (35 %), so that an interrupted step moves a scale by at
# most 1.5 %.
_LARGEST_SURPRISE = 0.3
# Limit of a scale, whatever is measured.
_BOUND = math.log(100.0)
# Make a new profile when a scale has moved this far from the one in use (5 %).
_NOTICEABLE = 0.05


class ProfileScale:
    """One factor each for prefill, decode and load, 1 at the start.

    The expected time of a step is the sum of its parts. The logarithm of measured / expected time
    is attributed to the kinds by their shares of the step. O(1) per step.

    Attributes:
        given: the uncorrected profile.
        profile: the corrected profile; a new object when factors changed noticeably.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self.given = profile
        self.profile = profile
        self._prefill = self._decode = self._load = 0.0  # logarithms
        self._applied = (0.0, 0.0, 0.0)

    @property
    def prefill(self) -> float:
        """Factor on prefills in `profile`."""
        return math.exp(self._applied[0])

    @property
    def decode(self) -> float:
        """Factor on decodes and on the fixed time of steps in `profile`."""
        return math.exp(self._applied[1])

    @property
    def load(self) -> float:
        """Factor on copies in both directions in `profile`."""
        return math.exp(self._applied[2])

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn from a step; `seconds` that are not positive and finite are ignored."""
        given = self.given
        self._observe(
            given.step_prefill(batch),
            given.step_decode(batch) if batch.sequences else 0.0,
            given.step_transfer(batch),
            seconds,
        )

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Learn from copies that should take `expected` seconds by `profile`."""
        self._observe(0.0, 0.0, expected / self.load, seconds)

    def _observe(self, prefill: float, decode: float, load: float, seconds: float) -> None:
        prefill *= math.exp(self._prefill)
        decode *= math.exp(self._decode)
        load *= math.exp(self._load)
        expected = prefill + decode + load
        if not (0.0 < seconds < math.inf) or expected <= 0.0:
            return
        surprise = math.log(seconds / expected)
        surprise = max(-_LARGEST_SURPRISE, min(surprise, _LARGEST_SURPRISE))
        move = _RATE * surprise * expected / (prefill**2 + decode**2 + load**2)
        self._prefill = _bounded(self._prefill + move * prefill)
        self._decode = _bounded(self._decode + move * decode)
        self._load = _bounded(self._load + move * load)
        self._apply()

    def _apply(self) -> None:
        scales = (self._prefill, self._decode, self._load)
        if max(abs(new - old) for new, old in zip(scales, self._applied, strict=True)) < (
            _NOTICEABLE
        ):
            return
        self._applied = scales
        self.profile = self.given.scaled(self.prefill, self.decode, self.load)


def _bounded(scale: float) -> float:
    return max(-_BOUND, min(scale, _BOUND))
