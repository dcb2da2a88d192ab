"""Quantiles of a stream in bounded memory: exact while it is short, within 0.1 % after that."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_EXACT = 131_072  # values kept as they are
# Bins of equal ratio between these; what lies outside counts as at the border.
_LOWEST, _HIGHEST, _RATIO = 1e-7, 1e9, 1.002


class Quantiles:
    """Takes non-negative values in batches and tells their quantiles.

    Beyond 131,072 values it keeps counts in bins whose borders are 0.2 % apart (18,433 of them),
    however many values there are.
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._count = 0
        self._bins: np.ndarray | None = None

    def add(self, values: np.ndarray) -> None:
        """Take in values."""
        self._count += len(values)
        if self._bins is None and self._count <= _EXACT:
            self._kept.append(values)
            return
        if self._bins is None:
            self._bins = np.zeros(_place(np.array([_HIGHEST]))[0] + 1, dtype=np.int64)
            for earlier in self._kept:
                self._bins += np.bincount(_place(earlier), minlength=len(self._bins))
            self._kept = []
        self._bins += np.bincount(_place(values), minlength=len(self._bins))

    def percentiles(self, wanted: Sequence[float]) -> list[float]:
        """The values below which that many per cent lie.

        Raises:
            ValueError: there are no values.
        """
        if not self._count:
            raise ValueError("no values")
        if self._bins is None:
            return [float(value) for value in np.percentile(np.concatenate(self._kept), wanted)]
        ranks = np.asarray(wanted) / 100 * (self._count - 1)
        places = np.searchsorted(np.cumsum(self._bins), ranks, side="right")
        return [float(_LOWEST * _RATIO ** (place + 0.5)) for place in places]


def _place(values: np.ndarray) -> np.ndarray:
    inside = np.clip(values, _LOWEST, _HIGHEST)
    places: np.ndarray = (np.log(inside / _LOWEST) / np.log(_RATIO)).astype(np.int64)
    return places
