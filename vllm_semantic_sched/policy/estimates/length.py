"""Expected output length, from bucket probabilities and what has been generated already."""

from __future__ import annotations

import bisect
import operator
import sys
from collections.abc import Sequence

from vllm_semantic_sched.policy.config.estimates import Estimate
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets

# A request that outlived everything expected of it: assume that it needs half as much again as
# it has had. A constant would make it look almost done for ever.
_OVERRUN_FACTOR = 1.5

_SHARE_BELOW = {"median": 0.5, "p90": 0.9}


def expected_output_tokens(
    probabilities: Sequence[float],
    buckets: LengthBuckets,
    generated: int,
    estimate: Estimate,
    limit: int = sys.maxsize,
) -> float:
    """Output length given that at least `generated + 1` tokens will come, and `limit` at most.

    Buckets that the request has outlived drop out and the rest is renormalised: the request
    moves on to the next bucket (the supervisor of S3, Jin et al. 2023).

    Args:
        probabilities: one per bucket.
        generated: output tokens so far.
        estimate: expectation, or a quantile of the lengths, taken as even within a bucket.
        limit: of tokens; above `generated`. A fact, so that no bucket stands for more: cutting
            their mean alone would make all requests look alike that are likely to reach it.

    Returns:
        Tokens, above `generated` and at most `limit`.
    """
    alive = bisect.bisect_right(buckets.edges, generated)
    total = sum(probabilities[alive:])
    if total <= 0:  # everything it was expected to be is behind it
        return min(_length_within(alive, buckets, generated), float(limit))
    if estimate == "mean":
        lengths = [
            min(_length_within(index, buckets, generated), limit)
            for index in range(alive, len(probabilities))
        ]
        expected: float = sum(map(operator.mul, probabilities[alive:], lengths))
        return expected / total
    quantile = _quantile(_SHARE_BELOW[estimate] * total, probabilities, buckets, generated)
    return min(quantile, float(limit))


def expected_without_prediction(default_tokens: int, generated: int) -> float:
    """Output length where nothing was predicted; always above `generated`."""
    if generated < default_tokens:
        return float(default_tokens)
    return _overrun(generated)


def _quantile(
    share: float, probabilities: Sequence[float], buckets: LengthBuckets, generated: int
) -> float:
    """Length that probability `share` of the buckets not yet outlived lies below."""
    low = float(generated)
    for index, probability in enumerate(probabilities):
        last = index == len(buckets.edges)
        if last:  # it has no upper edge; few answers are twice as long as its mean
            high = 2 * max(low, _length_within(index, buckets, generated))
        else:
            high = float(buckets.edges[index])
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
