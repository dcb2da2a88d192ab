"""Corrects an engine profile by what the steps of the running engine take."""

from __future__ import annotations

import math

from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile

# A scale follows the engine with a memory of about 1/_RATE steps.
_RATE = 0.05
# An observation counts as at most this far from what was expected (in logarithms: 35 %), so that
# a step that was interrupted moves a scale by 1.5 %, however long it took.
_LARGEST_SURPRISE = 0.3
# However wrong the profile or the observations are.
_BOUND = math.log(100.0)
# A new profile is made when a scale has moved this far from the one in use (5 %).
_NOTICEABLE = 0.05


class ProfileScale:
    """One factor each for prefill, decode and load, 1 at the start.

    A step is expected to take the sum of its parts. The difference to what it took is
    attributed to the kinds by their shares of the step, in logarithms, so that twice and half
    are equally far. O(1) per step.

    Attributes:
        given: the profile that is corrected.
        profile: the profile with the factors applied; a new object when they changed noticeably.
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
        """Factor on decodes, and on what any step takes, in `profile`."""
        return math.exp(self._applied[1])

    @property
    def load(self) -> float:
        """Factor on copies in both directions in `profile`."""
        return math.exp(self._applied[2])

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """A step with this in it took so long. A step of unknown length (not above zero, not
        finite) says nothing."""
        given = self.given
        self._observe(
            given.step_prefill(batch),
            given.step_decode(batch) if batch.sequences else 0.0,
            given.step_transfer(batch),
            seconds,
        )

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Copies that should take `expected` seconds by `profile` took so long."""
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
