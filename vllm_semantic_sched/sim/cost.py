"""How long one engine step takes: two models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile


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
        context: tokens of all of them together.
        longest_context: tokens of the longest of them, where the cost asks for it.
        chunks: prefills, whole or in part.
        saved: tokens of each preempted sequence whose KV goes to the host.
    """

    decodes: int = 0
    context: int = 0
    longest_context: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


class StepCost(Protocol):
    """An engine's speed.

    Attributes:
        uses_longest: whether `StepWork.longest_context` matters.
    """

    uses_longest: bool

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        ...


class SlowestOfBatch:
    """The paper's model: every sequence takes its own time by eq. 3 and 4, all run side by side,
    and the step lasts as long as the slowest. Saving victims' KV runs beside them as well."""

    uses_longest = True

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile

    def seconds(self, work: StepWork) -> float:
        profile = self._profile
        slowest = profile.save(sum(work.saved))
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
    """A batching engine: the terms of `policy.estimates.batch`; transfers between device and
    host come on top."""

    uses_longest = False

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile

    def seconds(self, work: StepWork) -> float:
        batch = Batch(decodes=work.decodes, context=work.context)
        for chunk in work.chunks:
            if chunk.is_decode:
                batch.add_decode(chunk.end)
            else:
                batch.add_prefill(chunk.start, chunk.end)
            batch.add_load(chunk.loaded)
        for tokens in work.saved:
            batch.add_save(tokens)
        return self._profile.step(batch)
