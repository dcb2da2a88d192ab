"""Lets the predicted lengths follow the answers of the model that is served.

A predictor learned how long other models' answers are. One that is served may answer at twice or
half that length; which prompts get the longer answers hardly changes. So the predicted
distribution over buckets is kept, and only the lengths that the buckets stand for move.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Sequence

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

# Share of an error that one request corrects: falls from the first to the last of these as
# requests come in, so that the first ones tell the rough factor and later ones are averaged.
_FIRST_STEP, _LAST_STEP = 1 / 10, 1 / 50

# Requests expected to be shorter than this share of the average bucket correct less than that:
# a long answer to one of them would otherwise throw all lengths off.
_STEADINESS = 0.3

_REMEMBERED = 0.99  # weight of a request in the ratio, per request since: about the last hundred

_SHORTEST = 1.0  # tokens; an answer has at least one


class AnswerEnd(enum.Enum):
    """How a request ended, as far as that says something about the length of its answer."""

    STOPPED = "stopped"  # the model ended its answer: this is the length
    CUT = "cut"  # by a limit of the client or the engine: the answer is at least that long
    ABORTED = "aborted"  # the client went, an error, anything else: says nothing


class LengthCalibration:
    """Length buckets that follow finished requests.

    The expected length of a request is the sum of bucket probability times bucket mean, so the
    means are the weights of a linear model, and the normalised least-mean-squares rule fits them
    to what is seen: O(buckets) per finished request, no history kept. An error is shared out in
    proportion to each mean, so that all buckets follow a model that is simply wordier, and more
    of it to the probable ones. The result is projected onto non-decreasing positive means, and
    each edge stays where it was between its two means.

    Answers cut by a limit raise an expectation that is below what they had already and never
    lower one. Where all clients set the same limit, the expectation becomes that of the length
    under it.

    Args:
        buckets: what the predictor was trained with.
        adapt: whether the buckets move; if not, only the ratio is kept.

    Attributes:
        buckets: the calibrated ones, replaced as a whole.
        adapt: as given; may be changed.
    """

    def __init__(self, buckets: LengthBuckets, adapt: bool = True) -> None:
        self.buckets = buckets
        self.adapt = adapt
        self._edge_places = [
            _place(edge, low, high)
            for edge, low, high in zip(
                buckets.edges, buckets.means[:-1], buckets.means[1:], strict=True
            )
        ]
        self._longest = max(buckets.means)
        self._learned = 0
        self._observed = self._expected = 0.0

    @property
    def ratio(self) -> float | None:
        """Observed by expected tokens over about the last hundred requests; None before the
        first. 1 is right, 3 means answers three times as long as expected."""
        return self._observed / self._expected if self._expected else None

    def learn(
        self, probabilities: Sequence[float], tokens: int, limit: int, end: AnswerEnd
    ) -> None:
        """Take in a finished request.

        Args:
            probabilities: what was predicted for it, one per bucket.
            tokens: output tokens it had.
            limit: most output tokens that it could have had.

        Raises:
            ValueError: there are not as many probabilities as buckets.
        """
        if end is AnswerEnd.ABORTED or tokens < 1:
            return
        means = self.buckets.means
        expected = sum(p * mean for p, mean in zip(probabilities, means, strict=True))
        if not (math.isfinite(expected) and expected > 0):
            return
        self._observed = _REMEMBERED * self._observed + tokens
        self._expected = _REMEMBERED * self._expected + min(expected, limit)
        if self.adapt and not (end is AnswerEnd.CUT and expected >= tokens):
            self._correct(probabilities, tokens, tokens - expected)

    def _correct(self, probabilities: Sequence[float], tokens: int, error: float) -> None:
        step = max(_LAST_STEP, 1 / (1 / _FIRST_STEP + self._learned))
        self._learned += 1
        # No bucket comes to stand for more than was ever seen or trained.
        self._longest = max(self._longest, tokens)
        old = self.buckets.means
        count = len(old)
        direction = [(p + 1 / count) * mean for p, mean in zip(probabilities, old, strict=True)]
        effect = sum(p * part for p, part in zip(probabilities, direction, strict=True))
        scale = step * error / (effect + _STEADINESS * sum(old) / count)
        moved = [mean + scale * part for mean, part in zip(old, direction, strict=True)]
        means = [min(max(mean, _SHORTEST), self._longest) for mean in nearest_non_decreasing(moved)]
        self.buckets = LengthBuckets(self._edges_between(means), tuple(means))

    def _edges_between(self, means: list[float]) -> tuple[int, ...]:
        edges: list[int] = []
        below = 0
        for place, low, high in zip(self._edge_places, means[:-1], means[1:], strict=True):
            # Where means coincide there is no room between them, and edges must increase.
            below = max(below + 1, round(low + place * (high - low)))
            edges.append(below)
        return tuple(edges)


def nearest_non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in squares (pool adjacent violators)."""
    if all(map(operator.le, values, values[1:])):
        return list(values)
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            above, members = pools.pop()
            mean = (mean * count + above * members) / (count + members)
            count += members
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _place(edge: int, low: float, high: float) -> float:
    """Where `edge` lies between two means, from 0 to 1."""
    return min(1.0, max(0.0, (edge - low) / (high - low))) if high > low else 0.5
