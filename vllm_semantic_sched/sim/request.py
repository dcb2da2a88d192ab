"""A request in the simulation: its true properties and its results."""

from dataclasses import dataclass, field

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.inversions import InversionCause
from vllm_semantic_sched.policy.record.spans import Span


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full KV block in the prefix cache. `hash`: of its tokens and all before them."""

    hash: int
    users: int  # requests with a seat that hold it


@dataclass(frozen=True, slots=True)
class SimRequest:
    """True properties of a request: `arrival` in seconds, lengths in tokens."""

    index: int
    arrival: float
    level: int
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    session: str = ""  # empty: it belongs to none
    hint: int | None = None  # level that its client states; None: see `workload.hints`
    limit: int | None = None  # its `max_tokens`; None: see `workload.limits`
    shortest: int = 0  # tokens before which its answer cannot end
    deadline: float | None = None  # seconds from arrival to the end of its answer
    blocks: tuple[int, ...] = ()  # hash of each whole KV block with all before it, if it shares any


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way through the engine. Times are in seconds."""

    request: SimRequest
    job: Job  # in the policy core
    prediction: Prediction | None  # that is to come
    blocks: int = 0  # KV blocks held, while it does not decode (`Decoding.blocks`)
    offset: int | None = None  # output tokens less `Decoding.tick` while it decodes
    loading: int = 0  # tokens that its next step loads from the host first
    seated: float = -1.0  # when it got its current seat
    started: float | None = None  # first of these times
    first_token: float | None = None
    finish: float | None = None
    recomputes: int = 0  # preemptions by kind of plan
    swaps: int = 0
    held: float = 0.0  # time in a seat without getting a token, up to the last release
    holds: list[Span] = field(default_factory=list)  # in its current seat, if recorded
    spans: list[Span] = field(default_factory=list)  # in a seat, each after its holds, if recorded
    engine: int = 0
    cached: list[CachedBlock] = field(default_factory=list)  # its blocks in the prefix cache
    found: int = 0  # tokens whose KV it found there, in all its seats
    refused: str = ""  # code of its refusal
    # See `policy.order.inversions`, by true urgency.
    seat_inversion: InversionCause | None = None
    finish_inversion: bool = False

    def span(self, start: float, end: float, kind: str, held: float = 0.0) -> Span:
        """A part of its time in the engine, see `Span`."""
        return Span(
            request=self.request.index,
            level=self.request.level,
            arrival=self.request.arrival,
            start=start,
            end=end,
            end_kind=kind,
            engine=self.engine,
            held=held,
        )
