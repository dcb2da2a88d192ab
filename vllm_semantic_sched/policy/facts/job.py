"""A request in the policy: its rank, data and state."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.facts.wait import Wait

BasePolicy = Literal["semantic", "priority", "sjf", "fcfs"]

OVERDUE = -1.0
"""Level of a request that aging has promoted above all others."""

DEADLINE_NEAR = -0.5
"""Level of a level-0 request close to its deadline; other requests gain up to level 0."""


class Rank(NamedTuple):
    """Lower runs first. The sequence number makes the order total (paper, section 3.3:
    (f_e, f_t); without a third term equal jobs would be compared as objects)."""

    level: float
    remaining: float  # seconds
    sequence: int


FIRST = float("-inf")
"""Remaining seconds in the rank of a waiting request that an operator has raised."""

_new_tuple = tuple.__new__


def rank_of(base: BasePolicy, level: float, remaining: float, sequence: int) -> Rank:
    """The rank of a job by its effective level and predicted seconds of work left (inf: unknown).
    Terms that the base policy ignores are zero; overdue jobs run by arrival under every policy."""
    if level <= OVERDUE:
        return Rank(OVERDUE, 0.0, sequence)
    terms = (
        level if base in ("semantic", "priority") else 0,
        remaining if base in ("semantic", "sjf") else 0.0,
        sequence,
    )
    return _new_tuple(Rank, terms)  # half the time of Rank(*terms)


class StatedLength(NamedTuple):
    """What a request says about the output tokens of its answer, beside its `max_tokens`."""

    shortest: int = 0  # the answer cannot end before
    longest: int | None = None  # the form of the answer allows no more; None: any number

    @property
    def exact(self) -> bool:
        """Whether the length is known."""
        return self.shortest == self.longest


FREE_LENGTH = StatedLength()


class StatedDeadlines(NamedTuple):
    """Seconds after its arrival within which a request's client wants something; None: unstated."""

    answer: float | None = None  # the whole answer; later it is of no use
    first_token: float | None = None  # an objective: the answer is wanted later, too


NO_DEADLINES = StatedDeadlines()


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
        """Whether no other state can follow."""
        return self in _ENDS


_ENDS = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.REFUSED}

LEGAL_MOVES = {
    JobState.WAITING: {JobState.RUNNING} | _ENDS,
    JobState.RUNNING: {JobState.WAITING, JobState.SWAPPED} | _ENDS,
    # The host copy of a waiting job can be lost (cache reset, pool needed elsewhere).
    JobState.SWAPPED: {JobState.RUNNING, JobState.WAITING} | _ENDS,
} | {end: set[JobState]() for end in _ENDS}
"""The edges of the state machine."""


class LevelSource(enum.Enum):
    """Origin of a job's urgency level, most trusted first. `OPERATOR`: set while it waited or ran.
    `INSTANT` is provisional: the instant reader's, until the predictor has read the prompt.
    `SESSION` is the floor of its session; provisional, too, if the prompt is to be read."""

    OPERATOR = "operator"
    HINT = "hint"
    PRIORITY = "priority"
    SERVICE_TIER = "service_tier"
    PREDICTION = "prediction"
    INSTANT = "instant"
    SESSION = "session"
    DEFAULT = "default"


UNREAD = (LevelSource.DEFAULT, LevelSource.INSTANT, LevelSource.SESSION)  # until it is read
STATED = (LevelSource.HINT, LevelSource.PRIORITY, LevelSource.SERVICE_TIER)  # by the client


class PrefillCost(Protocol):
    """The part of an engine profile that prices an admission."""

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from `start` to `end`."""


class Charge(NamedTuple):
    """What an admission was charged, to undo it."""

    level: int  # the tier that was charged
    seconds: float
    overtook: bool  # as is `credit`: see `order.credit.Overtaking`
    credit: float


@dataclass(slots=True)
class Stint:
    """What the meter knows of a job since it got its seat."""

    charged: int  # tokens, prompt and output, that have been charged
    prefill: int  # tokens to compute before the first output token
    generated: int  # output tokens at the start
    profile: PrefillCost  # by which the admission was charged


@dataclass(slots=True)
class Seat:
    """What a job holds from when it is taken out of the queue until it loses its seat."""

    blocks: int  # of KV, as the meter reported them last
    generated: int = 0  # output tokens of the job when it got the seat
    expected: float = 0.0  # KV tokens that it is predicted to need in the end
    charge: Charge | None = None  # of its admission, until it starts
    stint: Stint | None = None  # where use is metered
    start: int = 0  # tokens less steps, for the predicted peak of KV use
    held_since: float | None = None  # seconds; None while it is not held
    held_at: float | None = None  # the same in the virtual time of the running jobs
    held_for: Job | None = None  # the protected job
    yielded: int = 0  # steps in a row that its prefill has sat out
    restoring: float | None = None  # since when, in seconds, it restores lost KV, if logged


class Preempted(NamedTuple):
    """The preemptions that a job has had."""

    times: int = 0
    urgent: int = 0  # of these, for more urgent requests
    seconds: float = 0.0  # their planned cost


NEVER_PREEMPTED = Preempted()


@dataclass(slots=True)
class Draft:
    """Estimates of a job on its way, each used once, on arrival."""

    seconds: float | None  # rank seconds; None once they are used
    tokens: float  # prompt and output


class Source(NamedTuple):
    """What a replay needs to know of where a request came from."""

    came: float  # Unix time, before it waited for the end of a step
    block_hashes: Sequence[bytes]  # the engine's, of its whole KV blocks


class Floor(NamedTuple):
    """The level that a session's requests inherit, and the evidence for it."""

    level: int
    request_id: str  # the request that had the level
    source: LevelSource
    time: float  # seconds on the policy's clock, when it was last confirmed


@dataclass(slots=True)
class SessionTurn:
    """What a job knows of its session."""

    key: tuple[str, str]  # tenant, and the id that the client gave the session
    earlier: tuple[str, ...] = ()  # the session's last words, the newest first
    floor: Floor | None = None  # in force on arrival
    words: str = ""  # of this request, until the session has them
    number: int = 0  # of the turn, from 1

    def inherited(self, level: int, source: LevelSource) -> Floor | None:
        """The floor, if it replaces a level of this origin; None if the level stands. A level that
        the client states stands, and one that its text was read at unless the client stated the
        floor: else the text was read after that of the floor, and says whether it is over."""
        floor = self.floor
        if floor is None or floor.level >= level or source in STATED:
            return None
        is_read = source is LevelSource.PREDICTION
        return None if is_read and floor.source not in STATED else floor


@dataclass(slots=True)
class Credit:
    """Levels that a job has gained, by reason. The largest of them counts."""

    waiting: float = 0.0  # by the promotions of aging; with enough of them it is overdue
    promotions: int = 0
    deadline: float = 0.0  # by a near deadline of its first token
    preemptions: float = 0.0  # by too many of them (`preemption.after_limit: promote`)
    share: float = 0.0  # by its tier's missing share, when it got its seat

    def effective_level(self, level: float) -> float:
        """A level less all that was gained."""
        waited, shared = max(level - self.waiting, OVERDUE), max(level - self.share, 0.0)
        return min(waited, shared, self.deadline_level(level))

    def deadline_level(self, level: float) -> float:
        """A level less what was gained by a near deadline or by preemptions."""
        gained = max(self.deadline, self.preemptions)
        if not gained:
            return level
        return max(level - gained, 0.0) if level else DEADLINE_NEAR


@dataclass(slots=True, eq=False)
class Job:
    """One request. Times are seconds on the scheduler's clock."""

    # Identity, and what the request states
    request_id: str
    sequence: int  # arrival number
    arrival: float
    prompt_tokens: int  # as submitted
    max_output_tokens: int  # by the request's limit and its form
    level: int  # urgency, 0 = most urgent; in force
    level_source: LevelSource
    stated: StatedLength = FREE_LENGTH
    tenant: str = ""  # empty: unknown
    source: Source | None = None  # for the event log
    session: SessionTurn | None = None  # None: it belongs to no session
    patience: float | None = None  # seconds that its client waits for a first seat; None: unknown
    deadlines: StatedDeadlines = NO_DEADLINES

    # Estimates
    awaits_prediction: bool = False
    prediction: Prediction | None = None
    sure_level: int | None = 0  # the most urgent one whose rights it may have now; None: no rights
    best_level: int = 0  # the most urgent that its tenant's cap on top levels allows
    raised: bool = False  # by an operator: while it waits, it is the first of its level
    draft: Draft | None = None  # None: to be estimated anew

    # Place
    state: JobState = JobState.WAITING
    entered: float = 0.0  # when the state began
    seat: Seat | None = None
    wait: Wait | None = None  # why it waits, if that is logged; None with a seat
    computed: int = 0  # tokens whose KV is, or is expected to be, on the device
    swapped: int = 0  # tokens whose KV is on the host
    cached: int = 0  # while it waits: tokens that the prefix cache held for it when last asked
    generated: int = 0  # output tokens so far

    # Credit
    credit: Credit | None = None  # levels gained; None: none so far
    waited: float = 0.0  # seconds without a seat, up to `entered`, and seconds held

    # History
    preempted: Preempted = NEVER_PREEMPTED
    started: float | None = None  # first seat
    first_token: float | None = None
    read_at: float | None = None  # when its prediction came

    @property
    def effective_level(self) -> float:
        """Its level less what it gained by waiting, deadline, share or preemptions."""
        credit = self.credit
        return self.level if credit is None else credit.effective_level(self.level)

    @property
    def deadline_level(self) -> float:
        """Its level less what it gained by a near deadline or by preemptions."""
        credit = self.credit
        return self.level if credit is None else credit.deadline_level(self.level)

    def gain(self) -> Credit:
        """The record of what it gained, to change it."""
        if self.credit is None:
            self.credit = Credit()
        return self.credit

    @property
    def entitled_level(self) -> int | None:
        """The level whose rights it has: to take a seat, and to have others held. A provisional
        level gives those of its surest part; None: no rights until its text has been read."""
        return None if self.sure_level is None else max(self.level, self.sure_level)

    @property
    def level_unread(self) -> bool:
        """Whether its level may change when its prediction comes."""
        if not self.awaits_prediction:  # as once it is read
            return False
        return self.level_source in UNREAD

    @property
    def overdue(self) -> bool:
        """Whether aging has promoted it above all levels."""
        return self.credit is not None and self.level - self.credit.waiting <= OVERDUE

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far, which need KV to decode the next one."""
        return self.prompt_tokens + self.generated
