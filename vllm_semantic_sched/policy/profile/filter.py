"""A robust Kalman filter: it finds factors on the known parts of measured times."""

import math
from collections.abc import Sequence

Terms = Sequence[tuple[int, float]]
"""Parts of a time in seconds with factors of 1, each with the number of its factor."""

# So many measurements start all factors, by their lower quartile: the first steps of an engine are
# often many times too long.
_FIRST = 9
_BOUND = 100.0  # largest factor; its inverse is the smallest
# A measurement moves factors as if it deviated at most by so many standard deviations of its noise,
# and by one of what was expected: a disturbed step tells little.
_LIMIT = 2.5
# Standard deviation of a measurement, relative: at first, and its bounds.
_NOISE = 0.05
_LEAST_NOISE = 0.01
_MOST_NOISE = 0.2
# Weight of a measurement in the mean noise, and while measurements deviate to one side.
_NOISE_RATE = 0.02
_BIASED_NOISE_RATE = 0.005
# Standard deviation by which factors change per measurement, relative: each, and all together.
_DRIFT = 4e-4
_COMMON_DRIFT = 3e-3
_DRIFTS_AT_ONCE = 8  # measurements after which that is added
# If the mean deviation, in standard deviations, is beyond this, something has changed. Then each
# measurement adds a part of the prior to the covariance.
_BIASED = 1.3
_BIAS_RATE = 0.1  # weight of the latest deviation in that mean
_FORGET = 0.01  # that part


class TermFilter:
    """Finds the `factors` of seconds = sum of factor x part. Linear in seconds, so that a
    measurement that is too long and the next one, too short by as much, cancel out. Pure Python,
    O(factors^2) per measurement.

    Args:
        prior: relative covariance of the factors before any measurement.

    Attributes:
        contradicted: measurements like the latest deviate to one side: something has changed.
    """

    def __init__(self, prior: list[list[float]]) -> None:
        self.factors = [1.0] * len(prior)
        self.contradicted = False
        self._prior = prior
        self._covariance = [row[:] for row in prior]
        self._drifted = _drifted(len(prior))
        self._forgotten = _scaled(prior, _FORGET)
        self._noise = _NOISE**2  # relative variance of a measurement
        # Mean deviation of late of measurements with each part, in standard deviations.
        self._bias = [0.0] * len(prior)
        self._first: list[float] = []  # measured / expected
        self._count = 0

    def learn(self, terms: Terms, seconds: float) -> float:
        """Learn from a measurement; returns the relative variance of what was expected before it,
        1 while there is no expectation."""
        if len(self._first) >= _FIRST:
            return self._update(terms, seconds)
        self._first.append(seconds / sum(part for _, part in terms))
        if len(self._first) == _FIRST:
            speed = _bounded(sorted(self._first)[_FIRST // 4])
            self.factors = [speed] * len(self._prior)
            self._covariance = _scaled(self._prior, speed * speed)
        return 1.0

    def _update(self, terms: Terms, seconds: float) -> float:
        factors = self.factors
        expected = 0.0
        for number, part in terms:
            expected += factors[number] * part
        gains, known = self._gains(terms)
        noise = self._noise * expected * expected
        variance = known + noise
        surprise = seconds - expected
        limit = _LIMIT * math.sqrt(noise) + math.sqrt(known)
        clipped = max(-limit, min(surprise, limit))
        self._note_deviation(terms, expected, clipped / math.sqrt(variance))
        if known < noise:
            rate = _BIASED_NOISE_RATE if self.contradicted else _NOISE_RATE
            seen = (clipped / expected) ** 2
            self._noise += rate * (seen - self._noise)
            self._noise = max(_LEAST_NOISE**2, min(self._noise, _MOST_NOISE**2))
        move = clipped / variance
        self.factors = [a + gain * move for a, gain in zip(factors, gains, strict=True)]
        # What is clipped makes factors less certain than a measurement in full.
        weight = 1.0 / (variance * max(1.0, abs(surprise) / limit))
        rows = self._covariance
        for number, gain in enumerate(gains):
            share = gain * weight
            if share:
                row = rows[number]
                rows[number] = [a - share * b for a, b in zip(row, gains, strict=True)]
        if min(self.factors) < 1.0 / _BOUND or max(self.factors) > _BOUND:
            self._keep_bounds()
        self._count += 1
        if self._count % _DRIFTS_AT_ONCE == 0:
            self._loosen(self._drifted)
        if self.contradicted:
            self._loosen(self._forgotten)
        return known / (expected * expected)

    def _gains(self, terms: Terms) -> tuple[list[float], float]:
        """Covariance of all factors with the expected time, and the variance of that."""
        rows = self._covariance
        (number, part), *further = terms
        gains = [covariance * part for covariance in rows[number]]
        for number, part in further:
            gains = [gain + cov * part for gain, cov in zip(gains, rows[number], strict=True)]
        known = 0.0
        for number, part in terms:
            known += gains[number] * part
        return gains, max(known, 0.0)

    def _note_deviation(self, terms: Terms, expected: float, deviation: float) -> None:
        most = 0.0
        for number, part in terms:
            share = self.factors[number] * part / expected
            bias = self._bias[number]
            bias += _BIAS_RATE * abs(share) * (deviation - bias)
            self._bias[number] = bias
            most = max(most, abs(bias))
        self.contradicted = most > _BIASED

    def _keep_bounds(self) -> None:
        """Move factors back that left their bounds, and with each what was moved against it: the
        sums that were measured stay what they are."""
        for number, row in enumerate(self._covariance):
            factor = self.factors[number]
            excess = factor - _bounded(factor)
            if excess and row[number] > 0.0:
                share = excess / row[number]
                self.factors = [a - share * b for a, b in zip(self.factors, row, strict=True)]
        self.factors = [_bounded(factor) for factor in self.factors]

    def _loosen(self, by: list[list[float]]) -> None:
        """Add a relative covariance to those factors that are more certain than at first."""
        scales = []
        for number, (row, factor) in enumerate(zip(self._covariance, self.factors, strict=True)):
            is_more_certain = row[number] < self._prior[number][number] * factor * factor
            scales.append(factor if is_more_certain else 0.0)
        for row, more, scale in zip(self._covariance, by, scales, strict=True):
            if scale:
                row[:] = [a + scale * b * c for a, b, c in zip(row, more, scales, strict=True)]


def _drifted(count: int) -> list[list[float]]:
    """Relative covariance that `_DRIFTS_AT_ONCE` measurements add."""
    common = _DRIFTS_AT_ONCE * _COMMON_DRIFT**2
    own = _DRIFTS_AT_ONCE * _DRIFT**2
    rows = [[common] * count for _ in range(count)]
    for number, row in enumerate(rows):
        row[number] = common + own
    return rows


def _scaled(matrix: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    return [[factor * number for number in row] for row in matrix]


def _bounded(factor: float) -> float:
    return max(1.0 / _BOUND, min(factor, _BOUND))
