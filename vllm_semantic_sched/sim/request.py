"""A request in the simulation: its true properties and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction


@dataclass(frozen=True, slots=True)
class SimRequest:
    """True properties of a request: `arrival` in seconds, lengths in tokens.

    Attributes:
        hint: level that its client states; None: as the scenario says (`workload.hints`).
        limit: its `max_tokens`; None: as the scenario says (`workload.limits`).
        shortest: tokens before which its answer cannot end.
        blocks: hash of each of its whole KV blocks, with all before it; empty: it shares none.
    """

    index: int
    arrival: float
    level: int
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    hint: int | None = None
    limit: int | None = None
    shortest: int = 0
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class Seat:
    """Time in a seat, in seconds; `end_kind`: finish, recompute or swap; `holds`: start and end
    of each time in it in which the request was held."""

    start: float
    end: float
    end_kind: str
    holds: Sequence[tuple[float, float]] = ()

    @property
    def held(self) -> float:
        """Seconds of it without a token, because the request was held."""
        return sum(end - start for start, end in self.holds)


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way through the engine.

    Attributes:
        job: the request in the policy core.
        prediction: the coming prediction.
        blocks: KV blocks held, while it does not decode (`Decoding.blocks`).
        offset: output tokens less the engine's decode tick while it decodes, else None.
        loading: tokens that its next step loads from the host first.
        seated: time at which it got its current seat.
        started, first_token, finish: seconds; first time of each.
        recomputes, swaps: preemptions by kind of plan.
        held: seconds in a seat without getting a token, up to the last release.
        holds: start and end of each hold in its current seat, if recorded.
        seats: times in a seat, if recorded.
        engine: number of its engine.
        cached, shared: how many of the request's `blocks` are in the prefix cache for it, and how
            many of these it found there.
        refused: code of its refusal; else empty.
    """

    request: SimRequest
    job: Job
    prediction: Prediction | None
    blocks: int = 0
    offset: int | None = None
    loading: int = 0
    seated: float = -1.0
    started: float | None = None
    first_token: float | None = None
    finish: float | None = None
    recomputes: int = 0
    swaps: int = 0
    held: float = 0.0
    holds: list[tuple[float, float]] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)
    engine: int = 0
    cached: int = 0
    shared: int = 0
    refused: str = ""
