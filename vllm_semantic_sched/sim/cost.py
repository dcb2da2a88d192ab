"""How long one engine step takes: two models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from vllm_semantic_sched.policy.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of one sequence that a step computes, after it has loaded the KV
    of `loaded` tokens from the host."""

    start: int
    end: int
    loaded: int

    @property
    def is_decode(self) -> bool:
        """Whether a sequence whose KV was kept goes on with its newest token."""
        return self.start > 0 and self.end - self.start == 1


@dataclass(slots=True)
class StepWork:
    """What a step does.

    Attributes:
        decodes: sequences that get one more token.
        longest_context: tokens of the longest of them.
        chunks: prefills, whole or in part.
        saved: tokens of preempted sequences whose KV goes to the host.
    """

    decodes: int = 0
    longest_context: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    saved: int = 0


class StepCost(Protocol):
    """An engine's speed."""

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        ...


class SlowestOfBatch:
    """The paper's model: every sequence takes its own time by eq. 3 and 4, all run side by side,
    and the step lasts as long as the slowest. Saving victims' KV runs beside them as well."""

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile

    def seconds(self, work: StepWork) -> float:
        profile = self._profile
        slowest = profile.beta_save * work.saved
        if work.decodes:
            slowest = max(slowest, profile.decode(work.longest_context, 1))
        for chunk in work.chunks:
            compute = (
                profile.decode(chunk.end, 1)
                if chunk.is_decode
                else profile.prefill(chunk.start, chunk.end)
            )
            slowest = max(slowest, profile.load(chunk.loaded) + compute)
        return slowest


class SumOfTokens:
    """A batched engine: a constant per step, plus so much per decoding sequence and per prefill
    token; transfers between device and host come on top. All in seconds."""

    def __init__(
        self, profile: EngineProfile, step: float, per_decode: float, per_prefill_token: float
    ) -> None:
        self._profile = profile
        self._step = step
        self._per_decode = per_decode
        self._per_prefill_token = per_prefill_token

    def seconds(self, work: StepWork) -> float:
        resumed = sum(chunk.is_decode for chunk in work.chunks)
        prefilled = sum(chunk.end - chunk.start for chunk in work.chunks) - resumed
        loaded = sum(chunk.loaded for chunk in work.chunks)
        return (
            self._step
            + self._per_decode * (work.decodes + resumed)
            + self._per_prefill_token * prefilled
            + self._profile.load(loaded)
            + self._profile.beta_save * work.saved
        )
