"""What one engine step computes, in the few numbers that its duration depends on."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from vllm_semantic_sched.policy.section import Section


class BatchTerms(Section):
    """What a step of a batching engine costs beyond the tokens that it prefills."""

    step: float = Field(gt=0, description="Seconds per step, whatever is in it.")
    per_sequence: float = Field(
        0.0, ge=0, description="Seconds per sequence in the step, decoding or in prefill."
    )
    per_prefill: float = Field(
        0.0, ge=0, description="Seconds more per sequence in prefill, whatever its tokens."
    )
    per_context_token: float = Field(
        0.0, ge=0, description="Seconds per token of context of all decoding sequences together."
    )


@dataclass(slots=True)
class Batch:
    """The sequences of one step, summed up.

    Attributes:
        prefills, prefill_tokens: sequences in prefill, and the tokens computed for them.
        prefill_squares: sum of end^2 - start^2 over them, in tokens squared.
        decodes, context: decoding sequences, and their tokens together.
        loads, loaded: sequences whose KV comes from the host before the step, and its tokens.
        saves, saved: sequences whose KV goes to the host before the step, and its tokens.
    """

    prefills: int = 0
    prefill_tokens: int = 0
    prefill_squares: int = 0
    decodes: int = 0
    context: int = 0
    loads: int = 0
    loaded: int = 0
    saves: int = 0
    saved: int = 0

    @property
    def sequences(self) -> int:
        """Sequences that compute something in this step."""
        return self.prefills + self.decodes

    def add_prefill(self, start: int, end: int) -> None:
        """A sequence computes its tokens `start` to `end`."""
        self.prefills += 1
        self.prefill_tokens += end - start
        self.prefill_squares += end * end - start * start

    def add_decode(self, context: int) -> None:
        """A sequence of that many tokens gets its next one."""
        self.decodes += 1
        self.context += context

    def add_load(self, tokens: int) -> None:
        """KV of that many tokens of a sequence is loaded."""
        if tokens:
            self.loads += 1
            self.loaded += tokens

    def add_save(self, tokens: int) -> None:
        """KV of that many tokens of a sequence is saved."""
        if tokens:
            self.saves += 1
            self.saved += tokens
