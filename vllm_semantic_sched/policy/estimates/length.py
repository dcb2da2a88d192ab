"""Expected output length, from bucket probabilities and the tokens generated so far."""

import bisect
import sys
from collections.abc import Sequence
from typing import Literal

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

# Assume that a request that outlived all buckets needs half as many tokens again. With a constant
# it would always look almost finished.
_OVERRUN_FACTOR = 1.5

# Tokens of an answer of which nothing is known: about the mean of what chat models write. Only how
# such a request compares with those that were read depends on it.
DEFAULT_TOKENS = 256

Estimate = Literal["mean", "median", "p90"]

_SHARE_BELOW = {"median": 0.5, "p90": 0.9}


def expected_output_tokens(
    probabilities: Sequence[float],
    buckets: LengthBuckets,
    generated: int,
    estimate: Estimate | float,
    limit: int = sys.maxsize,
    shortest: int = 0,
) -> float:
    """Output tokens, given that more than `generated`, at least `shortest` and at most `limit`
    (more than `generated`) will come.

    Buckets that the request has outlived drop out and the rest is renormalized (the supervisor of
    S3, Jin et al. 2023). A request that has not reached `shortest` has outlived none, because it
    was not free to end. Probability beyond a bound moves to the bound: a long answer under a low
    limit does not become short by nature. Applied to the mean alone, a limit would make all
    requests that are likely to reach it look alike. `probabilities`: one per bucket. `estimate`:
    mean, or a quantile (a number: the share of answers within) of lengths uniform in each bucket.
    """
    if shortest >= limit:
        return float(limit)
    reached = generated if generated >= shortest else 0
    alive = bisect.bisect_right(buckets.edges, reached)
    if estimate != "mean":
        alive_share = sum(probabilities[alive:])
        if alive_share > 0:
            share = estimate if isinstance(estimate, float) else _SHARE_BELOW[estimate]
            quantile = _quantile(share * alive_share, probabilities, buckets, reached)
            return min(max(quantile, float(shortest)), float(limit))
    expected = 0.0
    total = 0.0
    for index in range(alive, len(probabilities)):
        probability = probabilities[index]
        if not probability:
            continue
        length: float = buckets.means[index]
        if length <= reached:
            length = _length_within(index, buckets, reached)
        total += probability
        expected += probability * min(max(length, shortest), limit)
    if total <= 0:  # it has outlived all predicted lengths
        return min(_length_within(alive, buckets, reached), float(limit))
    return expected / total


def expected_without_prediction(generated: int) -> float:
    """Output tokens without a prediction; always above `generated`."""
    return float(DEFAULT_TOKENS) if generated < DEFAULT_TOKENS else _overrun(generated)


def _quantile(
    share: float, probabilities: Sequence[float], buckets: LengthBuckets, generated: int
) -> float:
    """Length at which the buckets not yet outlived reach probability `share`."""
    low = float(generated)
    for index, probability in enumerate(probabilities):
        last = index == len(buckets.edges)
        high: float
        if last:
            # It has no upper edge; few answers are twice as long as its mean.
            high = 2 * max(low, _length_within(index, buckets, generated))
        else:
            high = buckets.edges[index]
        if high <= generated:  # outlived
            continue
        if last or probability >= share:
            place = share / probability if probability >= share > 0 else 1.0
            return max(low + place * (high - low), generated + 1.0)
        share -= probability
        low = high
    raise AssertionError("there is always a last bucket")


def _length_within(index: int, buckets: LengthBuckets, generated: int) -> float:
    mean = buckets.means[index]
    if mean > generated:
        return mean
    if index < len(buckets.edges):
        return (generated + 1 + buckets.edges[index]) / 2
    return _overrun(generated)


def _overrun(generated: int) -> float:
    return max(generated + 1.0, generated * _OVERRUN_FACTOR)
