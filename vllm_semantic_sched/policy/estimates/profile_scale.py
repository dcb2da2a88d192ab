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
    """One factor each for prefill, decode, sequence and load, 1 at the start.

    `decode` is for the fixed time of a step, `sequence` for what each sequence adds to it: their
    ratio decides how many run beside a protected request.

    The expected time of a step is the sum of its parts. The logarithm of measured / expected time
    is attributed to the kinds by their shares of the step. O(1) per step.

    Attributes:
        given: the uncorrected profile.
        profile: the corrected profile; a new object when factors changed noticeably.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self.given = profile
        self.profile = profile
        self._logs = [0.0] * 4  # of prefill, decode, sequence, load
        self._applied = tuple(self._logs)

    @property
    def prefill(self) -> float:
        """Factor on prefills in `profile`."""
        return math.exp(self._applied[0])

    @property
    def decode(self) -> float:
        """Factor on decodes and on the fixed time of steps in `profile`."""
        return math.exp(self._applied[1])

    @property
    def sequence(self) -> float:
        """Factor on the time of a step that grows with its sequences in `profile`."""
        return math.exp(self._applied[2])

    @property
    def load(self) -> float:
        """Factor on copies in both directions in `profile`."""
        return math.exp(self._applied[3])

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn from a step; `seconds` that are not positive and finite are ignored."""
        given = self.given
        fixed, sequences = 0.0, 0.0
        if batch.sequences:
            fixed, sequences = given.batch_terms.step, given.step_sequences(batch)
        parts = (given.step_prefill(batch), fixed, sequences, given.step_transfer(batch))
        self._observe(parts, seconds)

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Learn from copies that should take `expected` seconds by `profile`."""
        self._observe((0.0, 0.0, 0.0, expected / self.load), seconds)

    def _observe(self, parts: tuple[float, float, float, float], seconds: float) -> None:
        logs = self._logs
        scaled = [
            part * math.exp(log) if part else 0.0 for part, log in zip(parts, logs, strict=True)
        ]
        expected = sum(scaled)
        if not (0.0 < seconds < math.inf) or expected <= 0.0:
            return
        surprise = math.log(seconds / expected)
        surprise = max(-_LARGEST_SURPRISE, min(surprise, _LARGEST_SURPRISE))
        move = _RATE * surprise * expected / sum(part * part for part in scaled)
        self._logs = [_bounded(log + move * part) for log, part in zip(logs, scaled, strict=True)]
        self._apply()

    def _apply(self) -> None:
        logs = tuple(self._logs)
        if max(abs(new - old) for new, old in zip(logs, self._applied, strict=True)) < _NOTICEABLE:
            return
        self._applied = logs
        self.profile = self.given.scaled(self.prefill, self.decode, self.load, self.sequence)


def _bounded(scale: float) -> float:
    return max(-_BOUND, min(scale, _BOUND))
