"""Load of each replica, for `policy.placement`: what it tells the routers, and the requests that a
router has there."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.policy.placement import EngineReport, Placed, Placement
from vllm_semantic_sched.policy.sessions import Homes, SessionKey

STATS_KEY = "semsched"  # of a replica's load (see `load_of`) in Ray's routing statistics


def load_of(statuses: Sequence[Mapping[str, Any]], before: int) -> dict[str, Any]:
    """The load of a replica by the status of each engine (see `engine.http.commands.status`).

    `number` increases from `before`, that of the report before, while there are requests: Ray
    passes on changes only, and an unchanged load is new. `work`: requests, waiting and running;
    `by_level`: the same per level, most urgent first, None if unknown; `kv_free`: share of the KV
    cache, 0 to 1, None if unknown.
    """
    work = sum(status["running"] + status["waiting"] for status in statuses)
    levels = [status["levels"] for status in statuses]
    by_level = None
    if all(levels) and len(set(map(len, levels))) == 1:
        by_level = [sum(counts) for counts in zip(*levels, strict=True)]
        work = sum(by_level)
    free = [status["kv_free"] for status in statuses]
    kv_free = round(sum(free) / len(free), 2) if free else None
    number = before + (work > 0)
    return {"number": number, "work": work, "by_level": by_level, "kv_free": kv_free}


Replica = Hashable


@dataclass(slots=True)
class _Request:
    replica: Replica
    placed: Placed
    session: SessionKey | None
    sent: bool = False


class ReplicaChoice:
    """Chooses a replica for each request. Replicas come and go; the requests of one that has gone
    are forgotten. A request counts from its choice on, because a burst would otherwise see the same
    loads. `memory`: seconds for which sessions are remembered. Not thread-safe."""

    def __init__(
        self,
        levels: int,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._levels = levels
        self._clock = clock
        self._homes: Homes[Replica] = Homes(memory, clock)
        self._index: dict[Replica, int] = {}
        self._placement = Placement(1, levels)
        self._loads: dict[Replica, tuple[Mapping[str, Any], EngineReport]] = {}
        # By Ray's id of the request, which calls that depend on each other share.
        self._requests: dict[str, list[_Request]] = {}

    def update(self, stats: Mapping[Replica, Mapping[str, Any] | None]) -> None:
        """Take in the replicas that serve, with the routing statistics of each."""
        if stats.keys() != self._index.keys():
            self._set_replicas(list(stats))
        for replica, given in stats.items():
            load = (given or {}).get(STATS_KEY)
            known = self._loads.get(replica)
            if load is not None and (known is None or known[0] != load):
                by_level = tuple(load["by_level"] or ())
                levels = by_level if len(by_level) == self._levels else None
                report = EngineReport(self._clock(), load["work"], levels, load["kv_free"])
                self._loads[replica] = load, report
                self._placement.report(self._index[replica], report)

    def forget(self, replica: Replica) -> None:
        """Drop a replica that has gone, with its requests; no-op if it is unknown."""
        if replica in self._index:
            self._set_replicas([known for known in self._index if known != replica])

    def choose(self, request: str, level: int, session: SessionKey | None = None) -> Replica | None:
        """Choose a replica and count the request there; None without replicas. A request that was
        chosen for but not sent is counted at the new choice only. Those of a `session` stay
        together, see `Placement.place`."""
        self.drop(request)
        if not self._index:
            return None
        self._placement.expire(self._clock())
        home = None if session is None else self._homes.of(session)
        placed = self._placement.place(level, home=self._index.get(home))
        replica = list(self._index)[placed.engine]
        if session is not None:
            self._homes.move(session, replica)
        self._requests.setdefault(request, []).append(_Request(replica, placed, session))
        return replica

    def sent(self, request: str, replica: Replica) -> None:
        """A request goes to this replica, which need not be the chosen one."""
        entry = self._unsent(request)
        if entry is None:
            return
        entry.sent = True
        if replica not in self._index:
            self._remove(request, entry)
        elif entry.replica != replica:
            self._placement.leave(entry.placed)
            entry.placed = self._placement.count(self._index[replica], entry.placed.level)
            entry.replica = replica
            if entry.session is not None:
                self._homes.move(entry.session, replica)

    def drop(self, request: str) -> None:
        """A request is not sent, because it was cancelled."""
        entry = self._unsent(request)
        if entry is not None:
            self._remove(request, entry)

    def done(self, request: str, replica: Replica) -> None:
        """A request has ended at a replica; no-op if it is unknown there."""
        for entry in self._requests.get(request, ()):
            if entry.replica == replica and entry.sent:
                self._remove(request, entry)
                return

    def _unsent(self, request: str) -> _Request | None:
        return next((entry for entry in self._requests.get(request, ()) if not entry.sent), None)

    def _remove(self, request: str, entry: _Request) -> None:
        self._placement.leave(entry.placed)
        entries = self._requests[request]
        entries.remove(entry)
        if not entries:
            del self._requests[request]

    def _set_replicas(self, replicas: list[Replica]) -> None:
        self._index = {replica: index for index, replica in enumerate(replicas)}
        self._placement = Placement(max(1, len(replicas)), self._levels)
        self._loads = {
            replica: load for replica, load in self._loads.items() if replica in self._index
        }
        before = self._requests
        self._requests = {}
        for request, entries in before.items():
            for entry in entries:
                index = self._index.get(entry.replica)
                if index is not None:
                    entry.placed = self._placement.count(index, entry.placed.level)
                    self._requests.setdefault(request, []).append(entry)
        for replica, (_, report) in self._loads.items():
            self._placement.report(self._index[replica], report)
