"""Which urgency level a predicted distribution stands for (Bayes decision)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from vllm_semantic_sched.policy.section import Section


class Decision(Section):
    """From the predicted probabilities of the levels to one level."""

    rule: Literal["least_cost", "most_likely"] = Field(
        "least_cost",
        description="`least_cost`: the level with the lowest expected cost, where a mistake costs "
        "the number of levels it is off, times `missed_cost` if the request is more urgent than "
        "decided. `most_likely`: the most probable level, whatever mistakes cost.",
    )
    missed_cost: tuple[float, ...] = Field(
        (12.0, 6.0, 1.0),
        min_length=1,
        description="`least_cost`: what it costs to serve a request one level too late, beside 1 "
        "for one level too early; one number per true level, the last one for all further levels.",
    )

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
        if probability
    )


def mistake_cost(true: int, level: int, decision: Decision) -> float:
    """What it costs to serve a request of level `true` at `level`: levels off, weighted by
    `missed_cost` where it is served too late."""
    late = level - true
    if late <= 0:
        return float(-late)
    costs = decision.missed_cost
    return late * costs[min(true, len(costs) - 1)]
