"""What a step orders: values, applied in one place of the engine once all decisions are taken."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.retention import PreemptionPlan


class Victim(NamedTuple):
    """A running job that loses its seat."""

    job: Job
    plan: PreemptionPlan
    reason: str  # label of the metric `preemptions`
    beneficiary: Job | None = None  # the waiting job that it makes room for
    thrashed: bool = False  # it got few new tokens since its last preemption


class End(NamedTuple):
    """A job that ends without its answer."""

    job: Job
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits on the prefills of a step."""

    held: tuple[Job, ...] = ()  # running ones that sit out this step
    cap: int | None = None  # most prompt tokens of each other one; None: as many as it can use
    gated: bool = False  # no other one gets any
    beneficiary: Job | None = None  # the most urgent of those for which they do


NO_LIMITS = PrefillLimits()


@dataclass(slots=True)
class Orders:
    """The orders of one step. The state of the policy has changed accordingly; the engine carries
    them out in the order of the fields, and leaves out what has become impossible meanwhile."""

    end: list[End] = field(default_factory=list)
    preempt: list[Victim] = field(default_factory=list)
    release: list[Job] = field(default_factory=list)  # idle sessions: their KV is freed
    hold: Sequence[Job] = ()  # running jobs that get no token in this step, and no others
    prefills: PrefillLimits = NO_LIMITS
    moved: dict[Job, None] = field(default_factory=dict)  # have a new place, running or waiting
    # Jobs without a seat: no less urgent one gets a seat that one of them will need.
    keep_seats_for: Collection[Job] = ()
    first: Job | None = None  # no less urgent job gets a seat before this one
    # A protected job prefills: the engine must not put prefills off.
    protected_prefill: bool = False
    # Nothing was left to decide. Until a job comes, goes or moves, the next steps decode only.
    settled: bool = False

    @property
    def empty(self) -> bool:
        """Whether no job goes, moves, or sits out."""
        return not (self.end or self.preempt or self.release or self.hold or self.moved)
