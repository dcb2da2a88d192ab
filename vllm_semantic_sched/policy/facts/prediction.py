"""A prediction of the urgency and the output length of a request."""

import operator
from dataclasses import dataclass

from vllm_semantic_sched.policy.facts.decision import DEFAULT_DECISION, Decision

# Bounds of a forward pass of the predictor, which takes at least one text. An urgent request must
# not wait long for a pass in progress: the seconds count, by the measured speed.
MAX_BATCH, MAX_PASS = 16, 0.1  # texts, seconds


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted distribution over urgency levels and output-length buckets; each sums to 1."""

    urgency: tuple[float, ...]  # probability of each level, the most urgent first
    length: tuple[float, ...] | None = None  # of each of the `LengthBuckets`; None: not predicted
    unreadable: str | None = None  # why the text could not be judged; then the others mean nothing
    # Probability of each level of the most urgent part of a long text, from the instant reader.
    part: tuple[float, ...] | None = None
    decision: Decision = DEFAULT_DECISION  # of the model that read it


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Output lengths in tokens, divided into n buckets as in S3 (Jin et al., 2023). Bucket i holds
    the lengths from `edges[i - 1]` (inclusive) to `edges[i]` (exclusive)."""

    edges: tuple[int, ...]  # the n - 1 inner ones
    means: tuple[float, ...]  # of the n buckets

    def __post_init__(self) -> None:
        """ValueError if edges do not increase or their number does not match."""
        if len(self.means) != len(self.edges) + 1:
            raise ValueError(
                f"{len(self.edges)} inner edges make {len(self.edges) + 1} buckets, "
                f"but {len(self.means)} mean lengths are given"
            )
        if any(map(operator.ge, self.edges, self.edges[1:])):
            raise ValueError(f"bucket edges must increase: {self.edges}")
