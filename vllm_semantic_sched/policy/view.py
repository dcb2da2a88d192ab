"""What decisions ask of the engine and order from it: vLLM's own accounts, or a model of them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_semantic_sched.policy.eviction.victims import AdmissionView
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import Refusal


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Limits on the prefills of a step."""

    held: tuple[Job, ...] = ()  # running ones that sit out this step
    cap: int | None = None  # most prompt tokens of each other one; None: as many as it can use
    gated: bool = False  # no other one gets any
    beneficiary: Job | None = None  # the most urgent of those for which they do


NO_LIMITS = PrefillLimits()


class EngineView(AdmissionView, Protocol):
    """The engine as a step sees it: questions about its state, and orders to it."""

    # Questions

    def now(self) -> float:
        """Seconds, on the clock of `Job.arrival`."""

    def predictions(self) -> Iterable[tuple[Job, Prediction | None]]:
        """Predictions that have come back since the last call, of jobs that have not ended."""

    def running_by_urgency(self) -> Sequence[Job]:
        """The running jobs, most urgent first."""

    def can_advance(self, job: Job) -> bool:
        """Whether a running job gets a token in the next step: not if its last is in flight."""

    def prefilling(self) -> Collection[Job]:
        """Running jobs whose prefill is not complete; their `computed` is up to date."""

    def most_urgent_decode(self) -> Job | None:
        """The most urgent running job; None if it is in prefill, or none runs."""

    def is_paused(self) -> bool:
        """Whether an operator has paused the queue: no request gets a seat."""

    def free_seats(self) -> int:
        """Seats for waiting requests without KV on the device; negative where more are taken than
        there are. The engine gives seats to `loaded` requests first."""

    def loaded(self) -> Sequence[Job]:
        """Jobs without a seat whose KV is complete on the device, the most urgent first."""

    def returning(self) -> Collection[Job]:
        """Jobs without a seat that the engine will be able to seat soon and cannot now: their KV is
        being loaded, or their last output is in flight."""

    def free_blocks(self) -> int:
        """KV blocks for waiting requests, with those that running ones need next put aside."""

    def kv_use(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""

    def token_budget(self) -> float:
        """Most tokens in a step."""

    def decode_tokens(self) -> int:
        """Tokens of the budget that decoding requests take."""

    # Orders

    def reposition(self, jobs: Iterable[Job]) -> None:
        """The rank of these jobs changed; where they run, so does their place."""

    def preempt(self, job: Job, reason: str, beneficiary: Job | None = None) -> None:
        """Preempt a running job, for another one if that is known, and queue it again, or end it if
        that is the plan; or free the KV of an idle session."""

    def end(self, job: Job, refusal: Refusal) -> None:
        """End a job without its answer."""

    def hold(self, jobs: Collection[Job]) -> None:
        """Give these running jobs, and no others, no token in the coming step; they keep seat and
        KV."""

    def limit_prefills(self, limits: PrefillLimits) -> None:
        """Bound the tokens of prefills in the coming step; those that sit it out are held."""

    def keep_seats_for(self, jobs: Collection[Job]) -> None:
        """Give no seat that one of these jobs will need to a less urgent one in the coming step."""

    def admit_first(self, job: Job) -> None:
        """Give no less urgent job a seat in the coming step before this one has its own."""


def has_room(newcomer: Job, view: EngineView) -> bool:
    """Whether there are a seat and the KV blocks for a waiting job."""
    return view.free_seats() > 0 and view.needed_blocks(newcomer) <= view.free_blocks()
