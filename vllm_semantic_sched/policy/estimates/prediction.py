"""What a predictor says about one request: how urgent it is and how long its answer gets."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from vllm_semantic_sched.policy.section import Section


class Predictor(Section):
    """The model that reads urgency and output length from the prompt, beside the engine."""

    enabled: bool = Field(True, description="Off: levels come from hints only.")
    model: str | None = Field(
        None,
        description="Local path or hub id of a transformers sequence classifier whose labels, in "
        "order, are the urgency levels. Unset: the model shipped with the package.",
    )
    mode: Literal["immediate", "full_batching"] = Field(
        "immediate",
        description="Predict as soon as requests arrive, or wait for a full batch (paper, "
        "section 4.1).",
    )
    max_batch: int = Field(16, ge=1, description="Most texts in one forward pass.")
    max_wait: float = Field(
        0.05,
        ge=0,
        description="`full_batching`: seconds after which an incomplete batch goes anyway.",
    )
    max_queue: int = Field(
        10_000,
        ge=1,
        description="Texts that may wait for the predictor; requests beyond that run at the "
        "default level.",
    )
    cache_size: int = Field(
        4096,
        ge=0,
        description="Distinct prompts whose predictions are remembered; an identical prompt is "
        "answered from memory. 0: none.",
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds for one forward pass after which the predictor process counts as "
        "stuck and is started anew; its requests run at the default level.",
    )
    extra_latency: float = Field(
        0.0,
        ge=0,
        description="Seconds added to every batch: shows what a slower predictor would cost.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of the predictor process.")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted distribution over urgency levels and output-length buckets.

    `urgency[i]` is the probability of level i, 0 being the most urgent. `length[i]` is the
    probability of length bucket i (see `LengthBuckets`), None if the model has no such head.
    Both sum to 1.
    """

    urgency: tuple[float, ...]
    length: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Output lengths in tokens, divided into n buckets as in S3 (Jin et al., 2023).

    `edges` are the n - 1 inner edges, increasing: bucket i holds the lengths from
    `edges[i - 1]` (inclusive) to `edges[i]` (exclusive). `means` are the n mean lengths.
    Raises ValueError if the two do not belong together.
    """

    edges: tuple[int, ...]
    means: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.means) != len(self.edges) + 1:
            raise ValueError(
                f"{len(self.edges)} inner edges make {len(self.edges) + 1} buckets, "
                f"but {len(self.means)} mean lengths are given"
            )
        if any(low >= high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"bucket edges must increase: {self.edges}")
