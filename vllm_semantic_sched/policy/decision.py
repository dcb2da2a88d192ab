"""Which urgency level a predicted distribution stands for (Bayes decision)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_semantic_sched.policy.config import Decision


def decide_level(probabilities: Sequence[float], decision: Decision) -> int:
    """The level to serve a request at.

    Args:
        probabilities: one per level, calibrated, level 0 first.

    Returns:
        Under `least_cost` the level with the lowest expected cost, the more urgent one of two
        equals; under `most_likely` the most probable level.
    """
    levels = range(len(probabilities))
    if decision.rule == "most_likely":
        return max(levels, key=probabilities.__getitem__)
    return min(levels, key=lambda level: expected_cost(probabilities, level, decision))


def expected_cost(probabilities: Sequence[float], level: int, decision: Decision) -> float:
    """Expected cost of serving at `level`, in levels served too early."""
    return sum(
        probability * mistake_cost(true, level, decision)
        for true, probability in enumerate(probabilities)
    )


def mistake_cost(true: int, level: int, decision: Decision) -> float:
    """What it costs to serve a request of level `true` at `level`: levels off, weighted by
    `missed_cost` where it is served too late."""
    late = level - true
    if late <= 0:
        return float(-late)
    costs = decision.missed_cost
    return late * costs[min(true, len(costs) - 1)]
