"""Preempts running requests, saves their KV to the host pool, and counts what that costs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.clock import monotonic
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
from vllm_semantic_sched.engine.kv.recovery import take
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.requests.endings import Endings
from vllm_semantic_sched.engine.vllm_api import KVConnectorOutput, Request, Scheduler
from vllm_semantic_sched.policy.core import URGENT, SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.orders import Victim
from vllm_semantic_sched.policy.overload.refusal import DROPPED
from vllm_semantic_sched.policy.profile.cost import loads_beside_steps
from vllm_semantic_sched.policy.retention import (
    HostRoom,
    PreemptionKind,
    PreemptionPlan,
    tokens_left_on_device,
)


@dataclass(slots=True)
class _Victim:
    plan: PreemptionPlan
    kv_tokens: int  # those whose KV it had
    since: float = 0.0  # when it began to restore them, on the monotonic clock


class Preemptions:
    """Preempts requests as planned, for the policy and where vLLM does by itself, and counts what
    that costs. Without a usable swap connector, every plan recomputes; the log says why."""

    def __init__(
        self, scheduler: Scheduler, core: SchedulingCore, endings: Endings, counters: Counters
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._endings = endings
        self._reason = "kv_shortage"  # what vLLM itself preempts for
        self._ordered: Victim | None = None  # that vLLM is about to preempt
        self._counters = counters
        self._connector, problem = _usable_connector(scheduler)
        if problem is not None and core.policy.retention.mode not in ("recompute", "none"):
            logger.warning(
                "Semantic scheduling: KV of preempted requests is recomputed, because %s.", problem
            )
        if self.connector is not None:
            self.connector.ledger.loads_beside = lambda tokens: loads_beside_steps(
                tokens, core.profile
            )
            if scheduler.connector is self.connector and not core.policy.observe:
                # With a connector, vLLM delays freeing blocks, because a step in flight could
                # overwrite what the connector loads into them. Our copies are queued behind
                # earlier steps, so this is safe, and delayed blocks would rule out preemptions.
                vllm_api.free_blocks_at_once(scheduler)
        self._one_table = vllm_api.has_one_block_table(scheduler)
        self._expected_copies = self._seen_copies = 0.0  # seconds: since the last report, total
        self._away: dict[str, _Victim] = {}  # they wait for a seat
        self.returning: dict[str, _Victim] = {}  # they have one

    @property
    def connector(self) -> SemanticSwapConnector | None:
        """None if KV is recomputed."""
        connector = self._connector
        return None if connector is None or connector.unsupported is not None else connector

    def evict(self, request: Request, victim: Victim) -> None:
        """Preempt a running request between two steps, as the policy has ordered."""
        self._ordered = victim
        try:
            vllm_api.preempt(self._scheduler, request)
        finally:
            self._ordered = None
        if victim.reason == URGENT:
            self._counters.add("admission_preemptions")

    def release(self, session: Request) -> None:
        """Free the KV of an idle session for a more urgent request."""
        self._counters.add("preempted_tokens", count=session.num_computed_tokens)
        vllm_api.release_idle(self._scheduler, session)
        self._counters.add("admission_preemptions")

    @contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """While inside, whatever vLLM preempts by itself is preempted for this reason: label of the
        metric `preemptions`; the lifecycle records it, too."""
        before, self._reason = self._reason, reason
        try:
            yield
        finally:
            self._reason = before

    def begin(self, job: Job, request: Request, keep: bool) -> None:
        """Begin the preemption that vLLM is about to carry out, while the request holds its blocks:
        the one that the policy has ordered, or one of vLLM's own, of which it learns here. `keep`:
        whether the KV may be used later."""
        kv_tokens = vllm_api.tokens_with_kv(request)
        victim = self._ordered
        if victim is None or victim.job is not job:
            victim = self._report(job, request, kv_tokens, keep)
        plan = victim.plan
        if plan.saved and not self._save(request, plan):
            self._core.lose_copy(job)  # the host has no room for it any more
            plan = self._core.plan_preemption(job, kv_tokens)
        count = self._counters.add
        if victim.thrashed:
            count("thrashing_preemptions")
        count("preempted_tokens", count=kv_tokens)
        if plan.saved:
            count("saved_tokens", count=plan.saved)
            count("copy_seconds", ("save", "predicted"), plan.save_seconds)
            self._expected_copies += plan.save_seconds
        self.returning.pop(request.request_id, None)
        self._away[request.request_id] = _Victim(plan, kv_tokens)

    def _report(self, job: Job, request: Request, kv_tokens: int, keep: bool) -> Victim:
        """Let the policy plan a preemption that it has not ordered."""
        job.generated, job.computed = request.num_output_tokens, kv_tokens
        room = self.host_room(request, kv_tokens) if keep else None
        plan = self._core.plan_preemption(job, kv_tokens, room, can_drop=keep)
        victim = Victim(job, plan, self._reason, thrashed=self._core.is_thrashing(job))
        self._core.preempt(job, plan, self._reason)
        if plan.kind is PreemptionKind.DROP:
            self._endings.refuse_prompt(job, DROPPED)  # once it is back in the queue
        return victim

    def _save(self, request: Request, plan: PreemptionPlan) -> bool:
        """Order the copy to the host; False if that has no room."""
        assert self.connector is not None
        size, free = self._scheduler.hash_block_size, vllm_api.free_kv_blocks(self._scheduler)
        # The blocks stay allocated until they are saved, and no step waits for the save, if the
        # coming step finds enough others.
        beside = free >= vllm_api.most_blocks_of_a_step(self._scheduler)
        end = plan.on_device + plan.saved
        return self.connector.save(request, plan.on_device, end, size, beside)

    def resumed(self, request: Request) -> None:
        """Record that a preempted request got a seat in the step just scheduled."""
        away = self._away.pop(request.request_id, None)
        if away is None:
            return
        connector = self.connector
        loaded = connector.ledger.loaded.pop(request.request_id, None) if connector else None
        present = min(away.kv_tokens, vllm_api.tokens_with_kv(request))
        count = self._counters.add
        tokens = min(loaded.tokens, present) if loaded else 0
        count("loaded_tokens", count=tokens)
        count("found_tokens", count=present - tokens)
        count("recomputed_tokens", count=away.kv_tokens - present)
        load_seconds = self._core.profile.load(tokens)
        count("copy_seconds", ("load", "predicted"), load_seconds)
        self._expected_copies += load_seconds
        away.since = loaded.ordered if loaded else monotonic()
        self.returning[request.request_id] = away

    def watch(self, jobs: Mapping[str, Job]) -> None:
        """Record requests that have restored all tokens they had. Call once per step."""
        for request_id, back in list(self.returning.items()):
            request = self._scheduler.requests.get(request_id)
            if request is None:
                del self.returning[request_id]
            elif vllm_api.tokens_with_kv(request) > back.kv_tokens:
                del self.returning[request_id]
                self._core.restored(jobs[request_id])
                kind, elapsed = back.plan.kind.value, monotonic() - back.since
                self._counters.add("resume_seconds", (kind, "predicted"), back.plan.resume_seconds)
                self._counters.add("resume_seconds", (kind, "measured"), elapsed)

    def finished(self, request: Request) -> None:
        """A preempted request has ended: drop what is kept of its preemption."""
        away = self._away.pop(request.request_id, None)
        if away is not None:
            self._counters.add("abandoned_tokens", count=away.kv_tokens)
        self.returning.pop(request.request_id, None)

    def lose_copies(self, jobs: dict[str, Job]) -> None:
        """Forget all host copies; their requests will be recomputed."""
        if self.connector is None:
            return
        for request_id in self.connector.ledger.release_all():
            self._counters.add("lost_copies")
            if request_id in jobs:  # else it has ended, and releasing its copy failed
                self._core.lose_copy(jobs[request_id])

    def make_up_for_failures(self, jobs: dict[str, Job], output: KVConnectorOutput | None) -> None:
        """Compute again what the workers of a step did not load, before the step's output is used.
        Not to be guarded: that output may be wrong."""
        connector = self._connector
        blocks = set() if connector is None else connector.what_is_missing(output)
        if connector is None or not blocks:
            return
        self._counters.add("policy_errors", "kv_load")
        with self.because("reset"):
            failed = take(connector.failed.requests)
            if vllm_api.recompute_unloaded(self._scheduler, blocks, failed):
                self.lose_copies(jobs)

    @property
    def host_blocks(self) -> int:
        """KV blocks of the host pool; 0 if preempted requests are recomputed."""
        return 0 if self.connector is None else self.connector.ledger.pool.slots

    def gauges(self) -> dict[str, float]:
        """State of the host pool; updates the counters of measured seconds and of errors."""
        if self._connector is not None:
            for name, count in self._connector.failures.items():
                self._counters.raise_to("policy_errors", count, name)
        if self.connector is None:
            return {}
        for what, seconds in self.connector.measured.items():
            self._counters.raise_to("copy_seconds", seconds, (what, "measured"))
        # Tell the profile how long copies took since the last time, once all workers have reported.
        measured = sum(self.connector.measured.values())
        if measured > self._seen_copies and self._expected_copies > 0.0:
            seconds = measured - self._seen_copies
            self._core.estimates.observe_copies(self._expected_copies, seconds)
            self._expected_copies, self._seen_copies = 0.0, measured
        pool = self.connector.ledger.pool
        return {
            "host_pool_usage": pool.used / pool.slots,
            "host_pool_fragmentation": pool.fragmentation,
            "host_copies": len(self.connector.ledger),
        }

    def host_room(self, request: Request, kv_tokens: int) -> HostRoom | None:
        """See `policy.snapshot.Snapshot.host_room`."""
        connector = self.connector
        if connector is None or request.skip_reading_prefix_cache:
            return None
        scheduler, free = self._scheduler, connector.ledger.pool.free
        size: int = scheduler.block_size
        if self._one_table:
            full = kv_tokens // size
            cached, shared = vllm_api.prefix_cached_blocks(scheduler, request, first=full)
            # What the prefix cache will probably still hold when the request resumes.
            blocks = 1 + vllm_api.total_kv_blocks(scheduler)
            free_share = vllm_api.free_kv_blocks(scheduler) / blocks
            left = tokens_left_on_device(shared * size, cached * size, free_share)
            return HostRoom(size, free, on_device=left)
        # With several block tables or sliding windows, a part cannot be loaded: all must fit.
        fits = vllm_api.blocks_held(scheduler, request) <= free
        return HostRoom(size, -(-kv_tokens // size) if fits else 0, all_or_nothing=True)


def _usable_connector(scheduler: Scheduler) -> tuple[SemanticSwapConnector | None, str | None]:
    """The swap connector, alone or inside a MultiConnector, or why it cannot be used."""
    connectors = vllm_api.all_kv_connectors(scheduler)
    ours = next(
        (connector for connector in connectors if isinstance(connector, SemanticSwapConnector)),
        None,
    )
    if ours is None:
        return None, (
            "the server was started without the swap connector, which semsched serve adds where "
            "vLLM takes it"
        )
    if ours.unsupported is not None:
        return None, ours.unsupported
    if scheduler.requires_kv_delivery:
        return None, "another KV connector has to deliver the KV of preempted requests"
    if not ours.ledger.pool.slots:
        return None, "host_gib of the swap connector is less than one KV block"
    return ours, None
