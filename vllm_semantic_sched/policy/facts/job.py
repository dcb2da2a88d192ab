"""A request as the policy sees it: its rank, what is known about it and its state."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_semantic_sched.policy.facts.prediction import Prediction

BasePolicy = Literal["semantic", "priority", "sjf", "fcfs"]

# Level of a request that has waited as long as aging lets it; above all others.
OVERDUE = -1.0

# Level of a request of the most urgent level whose deadline is near; others gain up to level 0.
DEADLINE_NEAR = -0.5


class Rank(NamedTuple):
    """Lower runs first. The sequence number makes the order total (paper, section 3.3:
    (f_e, f_t); without a third term equal jobs would be compared as objects)."""

    level: float
    remaining: float  # seconds
    sequence: int


def rank_of(base: BasePolicy, level: float, remaining: float, sequence: int) -> Rank:
    """The rank of a job. Terms that the base policy does not look at are zero, so that the
    comparison falls through to the next one. Overdue jobs go by arrival under every policy.

    Args:
        level: effective urgency level, 0 = most urgent, `OVERDUE` before that.
        remaining: predicted seconds of engine work left; inf where nothing is known.
        sequence: arrival number.
    """
    if level <= OVERDUE:
        return Rank(OVERDUE, 0.0, sequence)
    return Rank(
        level if base in ("semantic", "priority") else 0,
        remaining if base in ("semantic", "sjf") else 0.0,
        sequence,
    )


class IllegalTransition(RuntimeError):
    """A job was moved between two states that the state machine does not connect."""


class JobState(enum.Enum):
    """Where a job stands, and so what can happen to it next. The values are the words of the
    event log and of the metrics."""

    WAITING = "queued"  # no KV, or only what the prefix cache still holds
    RUNNING = "running"  # has a seat and KV on the device
    SWAPPED = "swapped"  # waits for a seat, KV on the host
    COMPLETED = "completed"  # its answer is whole, or as long as was asked for
    FAILED = "failed"  # an error of the engine
    CANCELLED = "cancelled"  # the client went away
    REFUSED = "refused"  # ended by the policy

    # There is one object per state; Enum's own hash is that of the name, by way of Python code.
    __hash__ = object.__hash__

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return self in _ENDS


_ENDS = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.REFUSED}

_LEGAL = {
    JobState.WAITING: {JobState.RUNNING} | _ENDS,
    JobState.RUNNING: {JobState.WAITING, JobState.SWAPPED} | _ENDS,
    # A host copy can be lost (cache reset, pool needed elsewhere): then the job only waits.
    JobState.SWAPPED: {JobState.RUNNING, JobState.WAITING} | _ENDS,
} | {end: set[JobState]() for end in _ENDS}


class LevelSource(enum.Enum):
    """Where a job's urgency level comes from, most trusted first."""

    HINT = "hint"
    PRIORITY = "priority"
    PREDICTION = "prediction"
    DEFAULT = "default"


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        sequence: arrival number; makes every order total.
        arrival: seconds on the scheduler's clock.
        prompt_tokens, max_output_tokens: as submitted.
        level, level_source: current urgency level (0 = most urgent) and its origin.
        awaits_prediction: text is with the predictor and no answer has come.
        prediction: what the predictor said.
        computed: tokens whose KV is on the device, or expected to be found there.
        swapped: tokens whose KV is on the host.
        generated: output tokens so far.
        preemptions: times that it lost its seat to another request.
        preemption_seconds: what those have cost by plan.
        generated_before: output tokens when it lost its seat last.
        tenant: whose request it is; empty if unknown.
        best_level: the most urgent level that its tenant's part of the top levels leaves it.
        promotions, aged: how often aging promoted it, and by how many levels in all.
        deadline: when its first token is due, if its deadline is watched.
        deadline_boost: levels gained because the deadline is near.
        share_boost: levels that its tier was short of its share when it got its seat.
        state, entered: where it stands, and since when.
        started, first_token: when it got its first seat and its first token.
        waited: seconds without a seat, up to `entered`.
    """

    request_id: str
    sequence: int
    arrival: float
    prompt_tokens: int
    max_output_tokens: int
    level: int
    level_source: LevelSource
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
    share_boost: float = 0.0
    state: JobState = JobState.WAITING
    entered: float = 0.0
    started: float | None = None
    first_token: float | None = None
    waited: float = 0.0

    @property
    def effective_level(self) -> float:
        """The level that orders it: its own, less what it gained by waiting, by a near deadline
        or by its tier's share."""
        if not self.deadline_boost and not self.share_boost and not self.aged:
            return self.level
        aged = max(self.level - self.aged, OVERDUE)
        return min(aged, max(self.level - self.share_boost, 0.0), self.deadline_level)

    @property
    def deadline_level(self) -> float:
        """Its own level, less what it gained by a near deadline."""
        if not self.deadline_boost:
            return self.level
        return max(self.level - self.deadline_boost, 0.0) if self.level else DEADLINE_NEAR

    @property
    def overdue(self) -> bool:
        """Whether it has waited as long as aging lets it."""
        return self.level - self.aged <= OVERDUE

    @property
    def tokens(self) -> int:
        """Prompt and output tokens so far: what must have KV before the next one is decoded."""
        return self.prompt_tokens + self.generated

    def move_to(self, state: JobState, now: float) -> None:
        """Change state; see `policy.lifecycle` for who calls this.

        Args:
            now: seconds on the clock of `arrival`.

        Raises:
            IllegalTransition: the state machine has no such edge; the job is unchanged.
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
