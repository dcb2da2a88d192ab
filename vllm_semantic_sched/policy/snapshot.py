"""What a step knows of the engine: read once, before the first decision, and changed by none."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.retention import HostRoom


class Progress(NamedTuple):
    """How far the engine has come with a running job, in tokens."""

    computed: int  # that have KV, or get it in a step in flight
    generated: int  # of the answer
    with_kv: int  # of those computed, without what is in flight


class Snapshot(Protocol):
    """The engine between two steps, as vLLM will count it in the coming one.

    Attributes are about all requests, methods about one. Each is computed when a decision first
    asks for it, so that a step without decisions reads almost nothing; none changes anything.
    """

    @property
    def predictions(self) -> Iterable[tuple[Job, Prediction | None]]:
        """Predictions that have come back since the last step, of jobs that have not ended."""

    @property
    def paused(self) -> bool:
        """Whether an operator has paused the queue: no request gets a seat."""

    @property
    def running(self) -> Sequence[Job]:
        """Jobs with a seat, in the engine's order: most urgent first, but for what has changed
        since the last step."""

    @property
    def prefilling(self) -> Collection[Job]:
        """Those of them whose prefill is not complete."""

    @property
    def decoding(self) -> int:
        """How many of them decode in the coming step if nobody is held."""

    @property
    def loaded(self) -> Sequence[Job]:
        """Jobs without a seat whose KV is complete on the device, the most urgent first."""

    @property
    def idle(self) -> Sequence[Job]:
        """Sessions that hold KV while they wait for input, the least urgent first."""

    @property
    def returning(self) -> Collection[Job]:
        """Jobs without a seat that the engine will be able to seat soon and cannot now: their KV is
        being loaded, or their last output is in flight."""

    @property
    def seats(self) -> int:
        """Seats for waiting requests without KV on the device; negative where more are taken than
        there are. The engine gives seats to `loaded` requests first."""

    @property
    def blocks(self) -> int:
        """KV blocks for waiting requests, with those that running ones need next put aside."""

    @property
    def coming_blocks(self) -> int:
        """KV blocks that become free when the steps in flight have ended."""

    @property
    def frees_at_once(self) -> bool:
        """Whether the blocks of a victim are free in the coming step, not after those in flight."""

    @property
    def reserved_blocks(self) -> int:
        """KV blocks that the engine sets aside for running prefills before it begins to load KV
        for a waiting job."""

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""

    @property
    def token_budget(self) -> float:
        """Most tokens in a step."""

    @property
    def tokens_per_decode(self) -> int:
        """Tokens of that budget that a decoding request takes: 1, and its drafts."""

    # One running job

    def progress(self, job: Job) -> Progress:
        """How far the engine has come with it."""

    def can_advance(self, job: Job) -> bool:
        """Whether it gets a token in the coming step: not if its last is in flight."""

    def freeable_blocks(self, job: Job) -> int | None:
        """KV blocks that its preemption frees, or that an idle session gives back; None if it
        cannot be preempted now."""

    def next_blocks(self, job: Job) -> int:
        """KV blocks that `blocks` puts aside for its next token."""

    def host_room(self, job: Job, with_kv: int) -> HostRoom | None:
        """Room on the host for its KV, that of so many tokens; None if it would be recomputed."""

    # One job, waiting or running

    def can_end(self, job: Job) -> bool:
        """Whether its client can be told that it ends without its answer."""

    # One waiting job

    def is_ready(self, job: Job) -> bool:
        """Whether it could be admitted if there were room."""

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that it needs."""

    def cached_tokens(self, job: Job) -> int:
        """Tokens of which the prefix cache holds the KV: a beginning of whole blocks."""

    def obstacles(self, job: Job) -> Sequence[Collection[Job]]:
        """What it lacks besides a seat and blocks: groups of running jobs, each of which holds all
        of it, an adapter slot or room for an encoder's output. Empty: nothing."""


class Room:
    """Seats and KV blocks for waiting jobs: those of a snapshot, and what a step's orders free."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._seats = 0
        self._blocks = 0
        self._victims: dict[Job, int] = {}  # the blocks that each needs when it returns

    @property
    def seats(self) -> int:
        """Seats for waiting jobs, with those freed; negative as in `Snapshot.seats`."""
        return self._snapshot.seats + self._seats

    @property
    def blocks(self) -> int:
        """Blocks that are free in the coming step."""
        at_once = self._snapshot.frees_at_once
        return self._snapshot.blocks + (self._blocks if at_once else 0)

    @property
    def blocks_in_all(self) -> int:
        """The same, with those that are free when the steps in flight have ended."""
        return self._snapshot.blocks + self._snapshot.coming_blocks + self._blocks

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job needs; one that still runs in the snapshot, because it is
        preempted in this step, needs again what it gives back."""
        needed = self._victims.get(job)
        return self._snapshot.needed_blocks(job) if needed is None else needed

    def holds(self, job: Job) -> bool:
        """Whether there are a seat and the blocks for a waiting job."""
        return self.seats > 0 and self.needed_blocks(job) <= self.blocks

    def free(self, job: Job, seats: int = 1) -> None:
        """Count what a running job gives back, or an idle session, which keeps its seat."""
        self._seats += seats
        freed = self._snapshot.freeable_blocks(job) or 0
        if seats:
            freed += self._snapshot.next_blocks(job)
            self._victims[job] = freed
        self._blocks += freed
