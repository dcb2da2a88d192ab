"""Two models of the duration of an engine step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile


class Chunk(NamedTuple):
    """A step computes the tokens `start` to `end` of a sequence after loading the KV of `loaded`
    tokens from the host."""

    start: int
    end: int
    loaded: int

    @property
    def is_decode(self) -> bool:
        """Whether a sequence whose KV was kept continues with its newest token."""
        return self.start > 0 and self.end - self.start == 1


@dataclass(slots=True)
class StepWork:
    """The work of a step: sequences that get one more token and their tokens together, the tokens
    of the longest of them (if the cost model uses it), whole or partial prefills, and the tokens of
    each preempted sequence whose KV is saved to the host."""

    decodes: int = 0
    context: int = 0
    longest_context: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)


class StepCost(ABC):
    """A cost model; `uses_longest`: whether it uses `StepWork.longest_context`."""

    uses_longest = False

    def __init__(self, profile: EngineProfile) -> None:
        self._profile = profile

    @abstractmethod
    def seconds(self, work: StepWork) -> float:
        """Duration of a step in seconds."""


class SlowestOfBatch(StepCost):
    """The paper's model: all sequences run in parallel, each takes the time of eq. 3 and 4, and the
    step takes as long as the slowest. Saving victims' KV runs in parallel as well."""

    uses_longest = True

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


class SumOfTokens(StepCost):
    """A batching engine: the sum of the profile's terms for the batch and for the copies between
    device and host."""

    def seconds(self, work: StepWork) -> float:
        batch = Batch(decodes=work.decodes, context=work.context)
        for start, end, loaded in work.chunks:
            if start > 0 and end - start == 1:  # as in `Chunk.is_decode`
                batch.add_decode(end)
            else:
                batch.add_prefill(start, end)
            if loaded:
                batch.add_load(loaded)
        for tokens in work.saved:
            batch.add_save(tokens)
        return self._profile.step(batch)
