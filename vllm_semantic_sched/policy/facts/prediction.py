"""A prediction of the urgency and the output length of a request."""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted distribution over urgency levels and output-length buckets.

    `urgency[i]` is the probability of level i, 0 being the most urgent. `length[i]` is the
    probability of length bucket i (see `LengthBuckets`), None if the model has no such head.
    Both sum to 1. `unreadable` says why the reader could not judge the text, and nothing may be
    concluded from the probabilities; None if it could. `again`: of a second look at a part of the
    text, which may only raise the level.
    """

    urgency: tuple[float, ...]
    length: tuple[float, ...] | None = None
    unreadable: str | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Output lengths in tokens, divided into n buckets as in S3 (Jin et al., 2023).

    `edges` are the n - 1 increasing inner edges: bucket i holds the lengths from `edges[i - 1]`
    (inclusive) to `edges[i]` (exclusive). `means` are the n mean lengths. ValueError if edges do
    not increase or their number does not match.
    """

    edges: tuple[int, ...]
    means: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.means) != len(self.edges) + 1:
            raise ValueError(
                f"{len(self.edges)} inner edges make {len(self.edges) + 1} buckets, "
                f"but {len(self.means)} mean lengths are given"
            )
        if any(map(operator.ge, self.edges, self.edges[1:])):
            raise ValueError(f"bucket edges must increase: {self.edges}")
