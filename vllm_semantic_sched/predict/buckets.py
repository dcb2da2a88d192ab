"""Output-length buckets: cut at quantiles, so that each holds about as many answers (S3)."""

from bisect import bisect_right
from collections.abc import Sequence

from vllm_semantic_sched.policy.facts.prediction import LengthBuckets


def length_buckets(lengths: Sequence[int], count: int) -> LengthBuckets:
    """At most `count` buckets of `lengths` (tokens), fewer where quantiles coincide.

    Raises ValueError if there is nothing to divide.
    """
    if not lengths:
        raise ValueError("no lengths to make buckets of")
    ordered = sorted(lengths)
    quantiles = {ordered[len(ordered) * part // count] for part in range(1, count)}
    edges = tuple(sorted(edge for edge in quantiles if edge > ordered[0]))
    members: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for length in ordered:
        members[bucket_of(length, edges)].append(length)
    return LengthBuckets(edges, tuple(round(sum(part) / len(part), 1) for part in members))


def bucket_of(length: int, edges: Sequence[int]) -> int:
    """The bucket that `length` tokens fall into, given the increasing inner edges."""
    return bisect_right(edges, length)


def expected_tokens(probabilities: Sequence[float], buckets: LengthBuckets) -> float:
    """Mean length in tokens under the bucket probabilities."""
    return sum(share * mean for share, mean in zip(probabilities, buckets.means, strict=True))
