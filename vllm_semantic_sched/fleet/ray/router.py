"""Ray Serve's choice of a replica: the one with the least work at least as urgent."""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_semantic_sched.engine.http.preparation import PreviewRules, session_of
from vllm_semantic_sched.engine.http.request_context import RequestContext
from vllm_semantic_sched.engine.startup.settings import PolicyFile, parse_settings
from vllm_semantic_sched.fleet.ray.choice import ReplicaChoice
from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.live import check_live_change
from vllm_semantic_sched.policy.sessions import SessionKey

logger = logging.getLogger("ray.serve")

_FIELDS = ("vllm_xargs", "priority", "user", "prompt", "input", "messages")


class UrgencyRouter(RequestRouter):
    """Sends each request where the fewest requests at least as urgent are, by `policy.placement`,
    those of a session to the same replica while it is worth it. A request without a hint has the
    instant reader's level. If anything here fails, Ray chooses: the replica with the shortest
    queue."""

    def initialize_state(self, policy: str) -> None:
        """Called by Ray with `request_router_kwargs`: name or path of the replicas' policy. If it
        cannot be loaded, the default one is used: an exception would leave all requests waiting."""
        self._file: PolicyFile | None = None
        self._rules = PreviewRules(Policy(), None)
        try:
            self._file = PolicyFile(parse_settings({"semantic_sched": {"policy": policy}}).policy)
            self._rules = PreviewRules.of(load_policy(self._file.path))
        except Exception:
            logger.exception("Semantic scheduling: the router has no policy; hints only")
        self._choice = ReplicaChoice(
            self._rules.policy.levels,
            memory=lambda: self._rules.policy.sessions.memory,
        )
        self._failed: set[str] = set()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others, for the case that it is full."""
        if pending_request is None:
            return [candidate_replicas]
        # Else Ray asks again at once, over and over, while all replicas are full.
        pending_request.routing_context.should_backoff = True
        request = pending_request.metadata.internal_request_id
        try:
            level, session = self._level(pending_request), self._session(pending_request)
            chosen = self._choice.choose(request, level, session)
        except Exception:
            self._report("choosing a replica")
            return [candidate_replicas]
        first = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        others = [replica for replica in candidate_replicas if replica.replica_id != chosen]
        return [first, others]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when a replica comes, goes or reports another load."""
        super().update_replicas(replicas)
        try:
            self._choice.update({replica.replica_id: replica.routing_stats for replica in replicas})
            if self._file is not None and self._file.has_changed():
                self._reload(self._file)
        except Exception:
            self._report("reading the replicas' loads")

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray as soon as a request finds a replica dead."""
        super().on_replica_actor_died(replica_id)
        self._choice.forget(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray when a request has ended, was rejected or could not be sent."""
        self._choice.done(internal_request_id, replica_id)

    # Ray has no callback for a request that is cancelled before it is sent.
    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        request = pending_request.metadata.internal_request_id
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._choice.drop(request)
            raise
        self._choice.sent(request, replica.replica_id)
        return replica

    def _level(self, pending: PendingRequest) -> int:
        policy = self._rules.policy
        if not policy.uses_urgency or not pending.args:
            return policy.default_level
        request, context = _parts(pending)
        return self._rules.preview_of(request, context.priority, context.tenant).level

    def _session(self, pending: PendingRequest) -> SessionKey | None:
        """The session of a request; None without one, or if the policy has no sessions."""
        if self._rules.policy.sessions.memory is None or not pending.args:
            return None
        request, context = _parts(pending)
        return session_of(request, context.tenant, context.session)

    def _reload(self, file: PolicyFile) -> None:
        try:
            policy = load_policy(file.path)
            # The instant reader stays: what it depends on needs a restart.
            check_live_change(self._rules.policy, policy)
        except PolicyError as problem:
            logger.error("Semantic scheduling: the router keeps its policy: %s", problem)
            return
        self._rules = PreviewRules(policy, self._rules.instant)

    def _report(self, doing: str) -> None:
        if doing not in self._failed:  # a traceback for every request would fill the log
            self._failed.add(doing)
            logger.exception("Semantic scheduling: error while %s", doing)


def _parts(pending: PendingRequest) -> tuple[dict[str, Any], RequestContext]:
    """The body of a request as far as it is read, and its headers."""
    body, *more = pending.args
    request = {name: getattr(body, name, None) for name in _FIELDS}
    given = getattr(more[0], "headers", None) if more else None
    headers = [(name.lower().encode(), text.encode()) for name, text in (given or {}).items()]
    return request, RequestContext.of({"headers": headers})
