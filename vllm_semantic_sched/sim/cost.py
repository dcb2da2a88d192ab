"""Two models of the duration of an engine step, in seconds."""

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile


class Chunk(NamedTuple):
    """A step computes the tokens `start` to `end` of a sequence after loading the KV of `loaded`
    tokens from the host. One token after others is a decode: the sequence's KV was kept."""

    start: int
    end: int
    loaded: int


@dataclass(slots=True)
class StepWork:
    """What an engine step computes and copies."""

    decodes: int = 0  # sequences that get one more token
    context: int = 0  # their tokens together
    longest_context: int = 0  # tokens of the longest, if the cost model uses it
    chunks: list[Chunk] = field(default_factory=list)  # whole or partial prefills
    saved: list[int] = field(default_factory=list)  # tokens of victims whose KV goes to the host

    @property
    def sequences(self) -> int:
        """Sequences that compute something."""
        return self.decodes + len(self.chunks)


def slowest_of_batch(profile: EngineProfile, work: StepWork) -> float:
    """The paper's model: all sequences run in parallel, each takes the time of eq. 3 and 4, and the
    step takes as long as the slowest. Saving victims' KV runs in parallel as well."""
    slowest = profile.save(sum(work.saved))
    if work.decodes:
        slowest = max(slowest, profile.decode(work.longest_context, 1))
    for start, end, loaded in work.chunks:
        is_decode = start > 0 and end - start == 1
        compute = profile.decode(end, 1) if is_decode else profile.prefill(start, end)
        slowest = max(slowest, profile.load(loaded) + compute)
    return slowest


def sum_of_tokens(profile: EngineProfile, work: StepWork) -> float:
    """A batching engine: the sum of the profile's terms for the batch and its copies of KV."""
    batch = Batch(decodes=work.decodes, context=work.context)
    for start, end, loaded in work.chunks:
        if end - start == 1:  # attention treats one token as a decode, whatever it is
            batch.add_decode(end)
        else:
            batch.add_prefill(start, end)
        if loaded:
            batch.add_load(loaded)
    for tokens in work.saved:
        batch.add_save(tokens)
    return profile.step(batch)
