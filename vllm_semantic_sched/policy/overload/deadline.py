"""Which of the deadlines that requests state can be kept, by predicted waits and answers."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job


class Claim(NamedTuple):
    """A waiting request that states a deadline for its answer."""

    tokens: float  # predicted, prompt and output
    start_by: float  # latest time at which it must start, seconds
    job: Job


def not_kept(claims: Iterable[Claim], free_at: float, token_seconds: float) -> list[Claim]:
    """The fewest requests to give up so that the others start in time (Moore's algorithm 1968 for
    the number of late jobs: serve by deadline, and whenever one is late give up the longest so
    far). O(n log n).

    Args:
        free_at: when the first of them can start, seconds.
        token_seconds: for which the next one waits per token of one before it.
    """
    kept: list[tuple[float, int, Claim]] = []
    given_up = []
    start = free_at
    for number, claim in enumerate(sorted(claims, key=lambda claim: claim.start_by)):
        heapq.heappush(kept, (-claim.tokens, number, claim))
        if start > claim.start_by:
            longest = heapq.heappop(kept)[2]
            given_up.append(longest)
            start -= longest.tokens * token_seconds
        start += claim.tokens * token_seconds
    return given_up
