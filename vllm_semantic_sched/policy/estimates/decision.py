"""Which urgency level a predicted distribution stands for (Bayes decision)."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from vllm_semantic_sched.policy.section import Section


class Decision(Section):
    """From the predicted probabilities of the levels to one level."""

    rule: Literal["least_cost", "most_likely", "thresholds"] = Field(
        "least_cost",
        description="`least_cost`: the level with the lowest expected cost, where a mistake costs "
        "the number of levels it is off, times `missed_cost` if the request is more urgent than "
        "decided. `most_likely`: the most probable level, whatever mistakes cost. `thresholds`: "
        "the expected level, cut at `thresholds`; agrees best with nurses and finds fewer of the "
        "most urgent.",
    )
    missed_cost: tuple[float, ...] = Field(
        (12.0, 6.0, 1.0),
        min_length=1,
        description="`least_cost`: what it costs to serve a request one level too late, beside 1 "
        "for one level too early; one number per true level, the last one for all further levels.",
    )

    thresholds: tuple[float, ...] = Field(
        (0.56, 1.88, 2.38, 3.05),
        min_length=1,
        description="`thresholds`: the expected level (0 to 4, the mean under the predicted "
        "distribution) below which a request is of level 0, of level 1, and so on; from the last "
        "one on it is of the last level. The default fits the shipped model to emergency triage.",
    )

    @field_validator("thresholds")
    @classmethod
    def _thresholds_ascend(cls, thresholds: tuple[float, ...]) -> tuple[float, ...]:
        ascending = all(low < high for low, high in itertools.pairwise(thresholds))
        if not ascending or not all(map(math.isfinite, thresholds)):
            raise ValueError(f"decision.thresholds: {list(thresholds)} must be ascending numbers")
        return thresholds

    @field_validator("missed_cost")
    @classmethod
    def _costs_positive(cls, costs: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < cost < float("inf") for cost in costs):
            raise ValueError(f"decision.missed_cost: {list(costs)} must be numbers above 0")
        return costs


def decide_level(probabilities: Sequence[float], decision: Decision) -> int:
    """The level to serve a request at.

    Args:
        probabilities: one per level, calibrated, level 0 first.

    Returns:
        Under `least_cost` the level with the lowest expected cost, the more urgent one of two
        equals; under `most_likely` the most probable level; under `thresholds` the number of
        thresholds that the expected level has reached, at most the last level.
    """
    levels = range(len(probabilities))
    if decision.rule == "most_likely":
        return max(levels, key=probabilities.__getitem__)
    if decision.rule == "thresholds":
        reached = bisect.bisect_right(decision.thresholds, expected_level(probabilities))
        return min(reached, levels[-1])
    costs = [
        math.fsum(map(operator.mul, probabilities, row))
        for row in _costs_by_level(decision.missed_cost, len(levels))
    ]
    return costs.index(min(costs))


def expected_level(probabilities: Sequence[float]) -> float:
    """Mean level under the distribution, 0 to the last level."""
    return math.fsum(level * probability for level, probability in enumerate(probabilities))


def expected_cost(probabilities: Sequence[float], level: int, decision: Decision) -> float:
    """Expected cost of serving at `level`, in levels served too early."""
    row = _costs_by_level(decision.missed_cost, len(probabilities))[level]
    return math.fsum(map(operator.mul, probabilities, row))


def mistake_cost(true: int, level: int, decision: Decision) -> float:
    """What it costs to serve a request of level `true` at `level`: levels off, weighted by
    `missed_cost` where it is served too late."""
    late = level - true
    if late <= 0:
        return float(-late)
    costs = decision.missed_cost
    return late * costs[min(true, len(costs) - 1)]


@functools.lru_cache(maxsize=16)
def _costs_by_level(missed_cost: tuple[float, ...], levels: int) -> tuple[tuple[float, ...], ...]:
    """`mistake_cost` of serving at each level, by true level; asked for once per request."""
    decision = Decision(missed_cost=missed_cost)
    return tuple(
        tuple(mistake_cost(true, level, decision) for true in range(levels))
        for level in range(levels)
    )
