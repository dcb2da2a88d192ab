"""Corrects an engine profile by measured steps of the running engine.

A step takes the sum of the profile's terms, each times a factor: a step of so many sequences (a
factor at each of a few numbers of sequences, and straight lines between them), their context,
prefills, their tokens and their squares. A Kalman filter with all covariances finds the factors: it
knows which terms the steps so far could not tell apart, and lets a later step decide.
"""

import math
from collections.abc import Sequence

from vllm_semantic_sched.policy.profile.filter import TermFilter
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile

_SEQUENCES = (1, 4, 16, 64, 256, 1024)  # that have a factor
_DOUBLING = tuple(2**n for n in range(11))  # of `BatchTerms.steps`
_FACTORS = 10  # one for each of these, context, prefills, prefill tokens, prefill squares
_CONTEXT, _PREFILLS, _TOKENS, _SQUARES = range(len(_SEQUENCES), _FACTORS)
# Variances of the factors before any step. The first two together mean a factor of two.
_TOGETHER = 0.5  # of all factors together
_OWN = 0.5  # of each term by itself
_UNEVEN = 0.05  # of steps beside the straight line of the profile
_NEIGHBORS = 0.5  # correlation of the latter between neighbors
_LEAST_SLOPE = 1 / 64  # possible time per sequence, as a share of a step's fixed time
# Make a new profile when a factor has moved this far from the one in use (3 %).
_NOTICEABLE = 0.03
# Relative standard deviation of the predicted seconds of recent steps up to which they are certain.
_CERTAIN = 0.1
_RECENT = 0.05  # weight of a step in the mean of the recent ones
# A prefill whose tokens and squares weigh as much as those of this prompt stands for all.
_PROMPT = 2000


class ProfileScale:
    """Measured times as corrections of a `given` profile. O(1) per step, about 25 us. `profile`,
    with measured `batch.steps`, is a new object when factors have changed noticeably."""

    def __init__(self, profile: EngineProfile) -> None:
        self.given = self.profile = profile
        # Factors in `profile` on a prefill, copies in both directions, a step of one sequence.
        self.prefill = self.load = self.decode = 1.0
        self._given_steps = [profile.batch_terms.sequences(count) for count in _SEQUENCES]
        self._steps = TermFilter(_prior(self._given_steps))
        self._copies = TermFilter([[1.0]])
        self._typical = 1.0  # sequences in recent steps
        self._largest = 1  # most sequences in a step so far
        self._variance: float | None = None  # relative, of the predicted seconds of recent steps
        self._applied = [1.0] * _FACTORS

    @property
    def batch(self) -> float:
        """Factor on decode steps of the largest batch so far in `profile`."""
        given = self.given.batch_terms.sequences(self._largest)
        return self.profile.batch_terms.sequences(self._largest) / given

    @property
    def certain(self) -> bool:
        """Whether `profile` predicts steps like the recent ones well. A given profile that no step
        has been compared with is taken as it is."""
        if self._variance is None:
            return True
        return self._variance < _CERTAIN**2 and not self._steps.contradicted

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn from a step. Ignored: `seconds` that are not positive and finite, steps without
        sequences, and those with copies, which are measured by themselves."""
        if not 0.0 < seconds < math.inf or batch.loads or batch.saves or not batch.sequences:
            return
        self._largest = max(self._largest, batch.sequences)
        self._typical += _RECENT * (batch.sequences - self._typical)
        variance = self._steps.learn(self._terms(batch), seconds)
        before = variance if self._variance is None else self._variance
        self._variance = before + _RECENT * (variance - before)
        self._apply()

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Learn from copies that should take `expected` seconds by `profile`."""
        if expected > 0.0 and 0.0 < seconds < math.inf:
            self._copies.learn([(0, expected / self.load)], seconds)
            self._apply()

    def _terms(self, batch: Batch) -> list[tuple[int, float]]:
        """Given seconds by number of the factor; they add up to those of the step."""
        given = self.given
        below, above, weight = _place(batch.sequences)
        terms = [
            (below, (1.0 - weight) * self._given_steps[below]),
            (above, weight * self._given_steps[above]),
            (_CONTEXT, given.batch_terms.per_context_token * batch.context),
        ]
        if batch.prefills:
            terms += (
                (_PREFILLS, given.batch_terms.per_prefill * batch.prefills),
                (_TOKENS, given.alpha2 * batch.prefill_tokens),
                (_SQUARES, given.alpha1 * batch.prefill_squares),
            )
        return [(number, seconds) for number, seconds in terms if seconds]

    def _apply(self) -> None:
        """Make a new profile if it differs noticeably from the one in use."""
        factors = self._steps.factors
        load = self._copies.factors[0]
        changes = zip([load, *factors], [self.load, *self._applied], strict=True)
        if all(abs(new - old) < _NOTICEABLE * old for new, old in changes):
            return
        self._applied = factors[:]
        self.load = load
        given = self.given
        context, prefills, tokens, squares = factors[_CONTEXT:]
        steps = self._ordered_steps()
        self.decode = steps[0] / self._given_steps[0]
        linear = given.alpha2 * _PROMPT
        square = given.alpha1 * _PROMPT**2
        self.prefill = (linear * tokens + square * squares) / (linear + square)
        terms = given.batch_terms
        more = self._largest - 1
        slope = (_seconds_of(steps, self._largest) - steps[0]) / more if more else 0.0
        batch = BatchTerms(
            step=max(steps[0] - slope, 1e-3 * steps[0]),
            per_sequence=slope,
            per_prefill=terms.per_prefill * prefills,
            per_context_token=terms.per_context_token * context,
            steps=tuple(_seconds_of(steps, count) for count in _DOUBLING),
        )
        gamma1 = given.gamma1 * (context if terms.per_context_token else self.decode)
        alphas = {"alpha1": given.alpha1 * squares, "alpha2": given.alpha2 * tokens}
        scaled = given.scaled(self.prefill, self.decode, self.load, batch)
        self.profile = scaled.model_copy(update={**alphas, "gamma1": gamma1})

    def _ordered_steps(self) -> list[float]:
        """Seconds of steps of `_SEQUENCES`. More sequences take no less time, and a multiple of
        them at most that multiple, because so many steps could take their place. Where measurements
        disagree, those of recent steps count."""
        factors = self._steps.factors
        steps = [a * b for a, b in zip(self._given_steps, factors[:_CONTEXT], strict=True)]
        last = len(steps) - 1
        distances = [abs(math.log(count / self._typical)) for count in _SEQUENCES]
        recent = distances.index(min(distances))
        for index in range(recent + 1, last + 1):
            longest = steps[index - 1] * _SEQUENCES[index] / _SEQUENCES[index - 1]
            steps[index] = min(max(steps[index], steps[index - 1]), longest)
        for index in range(recent - 1, -1, -1):
            shortest = steps[index + 1] * _SEQUENCES[index] / _SEQUENCES[index + 1]
            steps[index] = max(min(steps[index], steps[index + 1]), shortest)
        return steps


def _place(count: int) -> tuple[int, int, float]:
    """The entries of `_SEQUENCES` that a number of sequences lies between, or the last two, and the
    weight of the second."""
    above = 1
    while above < len(_SEQUENCES) - 1 and count > _SEQUENCES[above]:
        above += 1
    start = _SEQUENCES[above - 1]
    end = _SEQUENCES[above]
    return above - 1, above, (count - start) / (end - start)


def _seconds_of(steps: Sequence[float], count: int) -> float:
    """Seconds of a step of so many sequences, from those of `_SEQUENCES`."""
    below, above, weight = _place(count)
    return steps[below] + weight * (steps[above] - steps[below])  # rounded, it still grows


def _prior(steps: Sequence[float]) -> list[list[float]]:
    """Relative covariance of the factors before any step, with given `steps` of `_SEQUENCES`. All
    may be wrong together, and each term by itself: so may the fixed time of a step and the time per
    sequence, and a little the straight line that these make."""
    slope = (steps[-1] - steps[0]) / (_SEQUENCES[-1] - 1)
    fixed = max(steps[0] - slope, 0.0)
    slope = max(slope, _LEAST_SLOPE * fixed)
    # Shares of the fixed time and of the time per sequence in each step.
    shares = []
    for count, seconds in zip(_SEQUENCES, steps, strict=True):
        shares.append((fixed / seconds, slope * count / seconds))

    def covariance(row: int, column: int) -> float:
        if max(row, column) >= len(steps):
            return _OWN * (row == column)
        fixed_row, slope_row = shares[row]
        fixed_column, slope_column = shares[column]
        together = fixed_row * fixed_column + slope_row * slope_column
        return float(_OWN * together + _UNEVEN * _NEIGHBORS ** abs(row - column))

    rows = []
    for row in range(_FACTORS):
        rows.append([_TOGETHER + covariance(row, column) for column in range(_FACTORS)])
    return rows
