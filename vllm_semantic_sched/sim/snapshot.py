"""What a step knows of the simulated engine."""

from collections.abc import Collection, Iterable, Sequence

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.retention import HostRoom
from vllm_semantic_sched.policy.snapshot import Progress
from vllm_semantic_sched.sim.accounts import Accounts


class EngineSnapshot:
    """The engine between two steps. A `policy.snapshot.Snapshot`."""

    # It has no KV connector, no sessions, no adapters, no images and no pause.
    loaded: Sequence[Job] = ()
    idle: Sequence[Job] = ()
    returning: Collection[Job] = ()
    coming_blocks = 0
    reserved_blocks = 0
    paused = False
    frees_at_once = True
    tokens_per_decode = 1

    def __init__(
        self, engine: Accounts, predictions: Iterable[tuple[Job, Prediction | None]] = ()
    ) -> None:
        self.engine = engine
        self.predictions = predictions

    @property
    def running(self) -> Sequence[Job]:
        return self.engine.running

    @property
    def prefilling(self) -> Collection[Job]:
        return self.engine.prefilling

    @property
    def decoding(self) -> int:
        return self.engine.decodes_now() + len(self.engine.decoding.held)

    @property
    def seats(self) -> int:
        return self.engine.seats - len(self.engine.running)

    @property
    def blocks(self) -> int:
        """Free blocks less those that decodes take in the coming step, or when released."""
        decoding = self.engine.decoding
        return self.engine.pool.free - decoding.growth(1) - decoding.held_growth

    @property
    def kv_use(self) -> float:
        pool = self.engine.pool
        return (pool.total - pool.free) / pool.total if pool.limited else 0.0

    @property
    def token_budget(self) -> float:
        return self.engine.token_budget

    def progress(self, job: Job) -> Progress:
        run, decoding = self.engine.runs[job], self.engine.decoding
        if run.offset is None:
            return Progress(job.computed, job.generated, job.computed)
        generated = run.offset + decoding.tick
        computed = job.prompt_tokens + generated - 1  # the newest token has no KV yet
        if self.engine.in_flight:
            generated -= 1  # that is known; it counts as computed, as in vLLM
        return Progress(computed, generated, computed)

    def can_advance(self, job: Job) -> bool:
        return self.engine.can_advance(job)

    def freeable_blocks(self, job: Job) -> int | None:
        run = self.engine.runs[job]
        return self.engine.decoding.blocks(run) - self.engine.prefixes.shared(run)

    def next_blocks(self, job: Job) -> int:
        return self.engine.decoding.next_blocks(self.engine.runs[job])

    def host_room(self, job: Job, with_kv: int) -> HostRoom | None:
        host = self.engine.host
        return HostRoom(host.block_size, host.free) if host.total else None

    def can_end(self, job: Job) -> bool:
        return True

    def is_ready(self, job: Job) -> bool:
        return job not in self.engine.stale

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job takes, less those that others hold of it."""
        return self.engine.needed_blocks(job)

    def cached_tokens(self, job: Job) -> int:
        return (
            self.engine.prefixes.cached_blocks(self.engine.runs[job]) * self.engine.pool.block_size
        )

    def obstacles(self, job: Job) -> Sequence[Collection[Job]]:
        return ()
