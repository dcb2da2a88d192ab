"""A request in the policy: its rank, data and state."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.waits import Wait

BasePolicy = Literal["semantic", "priority", "sjf", "fcfs"]

# Level of a request that aging has promoted above all others.
OVERDUE = -1.0

# Level of a level-0 request close to its deadline; other requests gain up to level 0.
DEADLINE_NEAR = -0.5


class Rank(NamedTuple):
    """Lower runs first. The sequence number makes the order total (paper, section 3.3:
    (f_e, f_t); without a third term equal jobs would be compared as objects)."""

    level: float
    remaining: float  # seconds
    sequence: int


_new_tuple = tuple.__new__


def rank_of(base: BasePolicy, level: float, remaining: float, sequence: int) -> Rank:
    """The rank of a job. Terms that the base policy ignores are zero. Overdue jobs run by arrival
    under every policy.

    Args:
        level: effective urgency level: 0 = most urgent, `OVERDUE` before that.
        remaining: predicted seconds of engine work left; inf if unknown.
        sequence: arrival number.
    """
    if level <= OVERDUE:
        return Rank(OVERDUE, 0.0, sequence)
    terms = (
        level if base in ("semantic", "priority") else 0,
        remaining if base in ("semantic", "sjf") else 0.0,
        sequence,
    )
    return _new_tuple(Rank, terms)  # half the time of Rank(*terms)


class StatedLength(NamedTuple):
    """What a request says about the output tokens of its answer, beside its `max_tokens`.

    Attributes:
        shortest: the answer cannot end before; 0: it may end at any time.
        longest: the form of the answer allows no more; None: any number.
    """

    shortest: int = 0
    longest: int | None = None

    @property
    def exact(self) -> bool:
        """Whether the length is known."""
        return self.shortest == self.longest


FREE_LENGTH = StatedLength()


class IllegalTransition(RuntimeError):
    """The state machine has no edge between two states."""


class JobState(enum.Enum):
    """State of a job. The values appear in the event log and in metrics."""

    WAITING = "queued"  # no KV, or only blocks in the prefix cache
    RUNNING = "running"  # has a seat and KV on the device
    SWAPPED = "swapped"  # waits for a seat, KV on the host
    COMPLETED = "completed"  # its answer is complete, or has reached its limit
    FAILED = "failed"  # an error of the engine
    CANCELLED = "cancelled"  # the client disconnected
    REFUSED = "refused"  # ended by the policy

    # Faster than Enum's own hash, which runs Python code.
    __hash__ = object.__hash__

    @property
    def is_end(self) -> bool:
        """Whether this is an end state."""
        return self in _ENDS


_ENDS = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.REFUSED}

_LEGAL = {
    JobState.WAITING: {JobState.RUNNING} | _ENDS,
    JobState.RUNNING: {JobState.WAITING, JobState.SWAPPED} | _ENDS,
    # The host copy of a waiting job can be lost (cache reset, pool needed elsewhere).
    JobState.SWAPPED: {JobState.RUNNING, JobState.WAITING} | _ENDS,
} | {end: set[JobState]() for end in _ENDS}


class LevelSource(enum.Enum):
    """Origin of a job's urgency level, most trusted first. `INSTANT` is provisional: the instant
    reader's, until the predictor has read the prompt. `SECOND_LOOK` has raised a prediction."""

    HINT = "hint"
    PRIORITY = "priority"
    PREDICTION = "prediction"
    SECOND_LOOK = "second_look"
    INSTANT = "instant"
    DEFAULT = "default"


class PassCause(enum.Enum):
    """Why a less urgent request that arrived later got its first seat before a request."""

    UNREAD = "unread"  # the prediction of one of them was not back
    MISREAD = "misread"  # it was taken for no more urgent; only the simulator can tell
    SHORTER = "shorter"  # the policy puts short requests first
    PROMOTED = "promoted"  # the other one gained levels: aging, deadlines, fair shares
    LIMIT = "limit"  # its tenant's cap or a hard reservation kept it waiting
    NOT_READY = "not_ready"  # the engine skipped it: its grammar, adapter or KV was not ready


class PrefillCost(Protocol):
    """The part of an engine profile that prices an admission."""

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from `start` to `end`."""


class Charge(NamedTuple):
    """What an admission was charged, to undo it.

    Attributes:
        level, seconds: the tier that was charged, and how much.
        overtook, credit: see `order.aging.Overtaking`.
        passes: see `WaitingQueue.passes`.
    """

    level: int
    seconds: float
    overtook: bool
    credit: float
    passes: Mapping[int, PassCause]


@dataclass(slots=True)
class Stint:
    """What the meter knows of a job since it got its seat.

    Attributes:
        charged: tokens, prompt and output, that have been charged.
        prefill: tokens to compute before the first output token.
        generated: output tokens at the start.
        profile: by which the admission was charged.
    """

    charged: int
    prefill: int
    generated: int
    profile: PrefillCost


@dataclass(slots=True)
class Seat:
    """What a job holds from when it is taken out of the queue until it loses its seat.

    Attributes:
        blocks: KV blocks, as the meter reported them last.
        expected: KV tokens that it is predicted to need in the end.
        charge: of its admission, until it starts.
        stint: what the meter knows, where use is metered.
        start: tokens less steps, for the predicted peak of KV use.
        held_since: while it is held, since when, in seconds.
        held_at: the same in the virtual time of the running jobs.
        held_for: the protected job for which it is held.
        restoring: since when it restores the KV that it lost, in seconds, if that is logged.
    """

    blocks: int
    expected: float = 0.0
    charge: Charge | None = None
    stint: Stint | None = None
    start: int = 0
    held_since: float | None = None
    held_at: float | None = None
    held_for: Job | None = None
    restoring: float | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        sequence: arrival number; makes every order total.
        arrival: seconds on the scheduler's clock.
        prompt_tokens: as submitted.
        max_output_tokens: most output tokens, by the request's limit and its form.
        stated: what the request says about its length.
        level, level_source: current urgency level (0 = most urgent) and its origin.
        awaits_prediction: the predictor has not answered yet.
        computed: tokens whose KV is, or is expected to be, on the device.
        swapped: tokens whose KV is on the host.
        generated: output tokens so far.
        preemptions, preemption_seconds: number and planned cost of its preemptions.
        generated_before: output tokens at its last preemption.
        tenant: empty if unknown.
        best_level: the most urgent level that its tenant's cap on top levels allows.
        promotions, aged: promotions by aging, and levels gained by them.
        deadline: time at which the first token is due, while it is watched.
        deadline_boost: levels gained by a near deadline.
        limit_boost: levels gained by too many preemptions.
        share_boost: levels gained by its tier's missing share when it got its seat.
        state, entered: state and the time at which it began.
        drafted_seconds, drafted_tokens: rank seconds, and prompt and output tokens, that were
            expected when it was drafted; each is used once, at its arrival.
        started, first_token: time of the first seat and of the first token.
        waited: seconds without a seat, up to `entered`, and seconds in which it was held.
        read_after, unread_level: first seats given before its prediction came, and its level until
            then; 0 if its level came from a hint or has not changed since.
        passed: why a less urgent, later job got its first seat before; None: none did.
        outrun: a less urgent job finished while it was there; known when it completes.
        seat: what it holds; None without a seat.
        wait: why it waits, if that is logged; None with a seat.
        came: Unix time at which the engine got it, before it waited for the end of a step.
        read_at: when its prediction came; None before.
        block_hashes: the engine's, of its whole KV blocks from the first on, if they are logged.
    """

    request_id: str
    sequence: int
    arrival: float
    prompt_tokens: int
    max_output_tokens: int
    level: int
    level_source: LevelSource
    stated: StatedLength = FREE_LENGTH
    awaits_prediction: bool = False
    prediction: Prediction | None = None
    computed: int = 0
    swapped: int = 0
    generated: int = 0
    preemptions: int = 0
    preemption_seconds: float = 0.0
    generated_before: int = 0
    tenant: str = ""
    best_level: int = 0
    promotions: int = 0
    aged: float = 0.0
    deadline: float = 0.0
    deadline_boost: float = 0.0
    limit_boost: float = 0.0
    share_boost: float = 0.0
    state: JobState = JobState.WAITING
    entered: float = 0.0
    started: float | None = None
    first_token: float | None = None
    waited: float = 0.0
    drafted_seconds: float | None = None
    drafted_tokens: float | None = None
    read_after: int = 0
    unread_level: int = 0
    passed: PassCause | None = None
    outrun: bool = False
    seat: Seat | None = None
    wait: Wait | None = None
    came: float | None = None
    read_at: float | None = None
    block_hashes: Sequence[bytes] = ()

    @property
    def effective_level(self) -> float:
        """Its level less what it gained by waiting, by a near deadline, by its tier's share or by
        too many preemptions."""
        if not (self.deadline_boost or self.share_boost or self.aged or self.limit_boost):
            return self.level
        aged = max(self.level - self.aged, OVERDUE)
        return min(aged, max(self.level - self.share_boost, 0.0), self.deadline_level)

    @property
    def deadline_level(self) -> float:
        """Its level less what it gained by a near deadline or by too many preemptions."""
        boost = max(self.deadline_boost, self.limit_boost)
        if not boost:
            return self.level
        return max(self.level - boost, 0.0) if self.level else DEADLINE_NEAR

    @property
    def level_unread(self) -> bool:
        """Whether its level may change when its prediction comes."""
        provisional = self.level_source in (LevelSource.DEFAULT, LevelSource.INSTANT)
        return provisional and self.awaits_prediction

    @property
    def overdue(self) -> bool:
        """Whether aging has promoted it above all levels."""
        return self.level - self.aged <= OVERDUE

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far, which need KV to decode the next one."""
        return self.prompt_tokens + self.generated

    def move_to(self, state: JobState, now: float) -> None:
        """Change state at time `now`. Only `policy.lifecycle` calls this.

        Raises:
            IllegalTransition: no such edge; the job is unchanged.
        """
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(
                f"request {self.request_id}: {self.state.value} -> {state.value}"
            )
        if self.state is not JobState.RUNNING:
            self.waited += now - self.entered
        if state is JobState.RUNNING and self.started is None:
            self.started = now
        self.state = state
        self.entered = now
