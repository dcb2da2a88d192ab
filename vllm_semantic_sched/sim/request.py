"""A request in the simulation: what is true of it, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction


@dataclass(frozen=True, slots=True)
class SimRequest:
    """What only the simulator knows. `arrival` in seconds, lengths in tokens, `level` true."""

    index: int
    arrival: float
    level: int
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""


@dataclass(slots=True)
class Seat:
    """Time in a seat, in seconds; `end_kind` is finish, recompute or swap (how it was lost)."""

    start: float
    end: float
    end_kind: str


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way through the engine.

    Attributes:
        job: the policy core's view of it.
        prediction: what the predictor will say.
        blocks: KV blocks held, while it does not decode (`Decoding.blocks`).
        offset: output tokens less the engine's decode tick while it decodes, else None. All
            decoding requests gain one token a step, so none has to be touched for that.
        loading: tokens that its next step loads from the host first.
        seated: when it got the seat that it has.
        started, first_token, finish: seconds; first time of each.
        recomputes, swaps: preemptions by what happened to the KV.
        seats: times in a seat, where they are recorded.
        engine: which of several engines it was sent to.
        refused: why the policy ended it, the code of a refusal; empty if it did not.
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
    seats: list[Seat] = field(default_factory=list)
    engine: int = 0
    refused: str = ""
