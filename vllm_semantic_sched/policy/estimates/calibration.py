"""Adjusts predicted lengths to the served model, whose answers may be twice or half as long as
those that the predictor learned from. The same prompts get the longer ones, so the probabilities
stay and only the mean lengths of the buckets move."""

import enum
import itertools
import math
import operator
from collections.abc import Sequence

from vllm_semantic_sched.policy.facts.lately import Decayed
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

# Share of an error that one request corrects. It falls with the number of requests: the first ones
# find the rough factor, later ones are averaged.
_FIRST_STEP = 1 / 10
_LAST_STEP = 1 / 50

# Requests expected to be shorter than this share of the average bucket correct less, or one long
# answer to such a request would distort all lengths.
_STEADINESS = 0.3

_REMEMBERED = 100.0  # requests after which one counts 1/e in the ratio
_OBSERVED, _EXPECTED = 0, 1  # places in `LengthCalibration._lengths`

_SHORTEST = 1.0  # tokens


class AnswerEnd(enum.Enum):
    """How an answer ended, and so what its length means."""

    STOPPED = "stopped"  # the model ended its answer: the length is known
    CUT = "cut"  # by a limit of the client or the engine: the length is a lower bound
    ABORTED = "aborted"  # client disconnected, error, or other: the length is unknown


class LengthCalibration:
    """Length buckets that follow finished requests.

    The means are the weights of a linear model of the expected length, which the normalized
    least-mean-squares rule fits to observed lengths: each takes a part of the error in proportion
    to itself, plus more if its bucket is probable. The result is projected onto non-decreasing
    positive means, and each edge keeps its relative place between its two means. Answers cut by a
    limit only raise expectations: under one limit for all, to the length under that limit.
    """

    def __init__(self, buckets: LengthBuckets) -> None:
        self.buckets = buckets  # calibrated; replaced as a whole
        # Of each edge: from 0, at the mean below, to 1, at the mean above.
        self._edge_places = []
        means = itertools.pairwise(buckets.means)
        for edge, (low, high) in zip(buckets.edges, means, strict=True):
            place = (edge - low) / (high - low) if high > low else 0.5
            self._edge_places.append(min(1.0, max(0.0, place)))
        self._longest = max(buckets.means)
        self._learned = 0
        self._lengths = Decayed(2)  # tokens, observed and expected

    @property
    def ratio(self) -> float | None:
        """Observed / expected tokens of about the last hundred requests; None before the first.
        3 means that answers are three times as long as expected."""
        observed, expected = self._lengths.sums
        return observed / expected if expected else None

    def learn(
        self, probabilities: Sequence[float], tokens: int, limit: int, end: AnswerEnd
    ) -> None:
        """Learn from a finished request: its predicted probabilities (one per bucket, else
        ValueError), and its output tokens and their limit."""
        if end is AnswerEnd.ABORTED or tokens < 1:
            return
        means = self.buckets.means
        if len(probabilities) != len(means):
            raise ValueError(f"{len(probabilities)} probabilities for {len(means)} buckets")
        expected: float = sum(map(operator.mul, probabilities, means))
        if not (math.isfinite(expected) and expected > 0):
            return
        self._lengths.age(1, _REMEMBERED)
        self._lengths.add(_OBSERVED, tokens)
        self._lengths.add(_EXPECTED, min(expected, limit))
        if end is not AnswerEnd.CUT or expected < tokens:
            self._correct(probabilities, tokens, tokens - expected)

    def _correct(self, probabilities: Sequence[float], tokens: int, error: float) -> None:
        step = max(_LAST_STEP, 1 / (1 / _FIRST_STEP + self._learned))
        self._learned += 1
        # No mean exceeds the longest length seen or trained.
        self._longest = max(self._longest, tokens)
        longest = self._longest
        old = self.buckets.means
        count = len(old)
        more = 1 / count
        direction = [(p + more) * mean for p, mean in zip(probabilities, old, strict=True)]
        effect: float = sum(map(operator.mul, probabilities, direction))
        scale = step * error / (effect + _STEADINESS * sum(old) / count)
        moved = [mean + scale * part for mean, part in zip(old, direction, strict=True)]
        means = [min(max(mean, _SHORTEST), longest) for mean in nearest_non_decreasing(moved)]
        edges = [0]
        for place, (low, high) in zip(self._edge_places, itertools.pairwise(means), strict=True):
            # Edges must increase even if means are equal.
            edges.append(max(edges[-1] + 1, round(low + place * (high - low))))
        self.buckets = LengthBuckets(tuple(edges[1:]), tuple(means))


def nearest_non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in squares (pool adjacent violators)."""
    if all(map(operator.le, values, values[1:])):
        return list(values)
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean = value
        count = 1
        while pools and pools[-1][0] > mean:
            above, members = pools.pop()
            mean = (mean * count + above * members) / (count + members)
            count += members
        pools.append((mean, count))
    result: list[float] = []
    for mean, count in pools:
        result += [mean] * count
    return result
