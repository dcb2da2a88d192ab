"""Load of each replica, for `policy.placement`: what it tells the routers, and the requests that a
router has there."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from vllm_semantic_sched.policy.placement import EngineReport, Placed, Placement

_KEY = "semsched"


class ReplicaLoad(NamedTuple):
    """Requests of a replica, on all its engines."""

    # Increases while there are requests: Ray passes on changes only, and an unchanged load is new.
    number: int
    work: int  # requests, waiting and running
    by_level: Sequence[int] | None = None  # the same per level, most urgent first; None: unknown
    kv_free: float | None = None  # share of the KV cache that is free, 0 to 1; None: unknown

    @classmethod
    def of_engines(cls, statuses: Sequence[Mapping[str, Any]], before: int) -> Self:
        """The load by the status of each engine (see `engine.http.commands.status`); `before`: the
        `number` of the report before."""
        work = sum(status["running"] + status["waiting"] for status in statuses)
        levels = [status["levels"] for status in statuses]
        by_level = None
        if all(levels) and len(set(map(len, levels))) == 1:
            by_level = [sum(counts) for counts in zip(*levels, strict=True)]
            work = sum(by_level)
        free = [status["kv_free"] for status in statuses]
        kv_free = round(sum(free) / len(free), 2) if free else None
        return cls(before + (work > 0), work, by_level, kv_free)

    def to_stats(self) -> dict[str, Any]:
        """An entry for Ray's routing statistics."""
        return {_KEY: self._asdict()}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any] | None) -> Self | None:
        """The load in Ray's routing statistics; None if it is missing."""
        given = (stats or {}).get(_KEY)
        return None if given is None else cls(*(given[name] for name in cls._fields))


Replica = Hashable


@dataclass(slots=True)
class _Request:
    replica: Replica
    placed: Placed
    sent: bool = False


class ReplicaChoice:
    """Chooses a replica for each request. Replicas come and go; the requests of one that has gone
    are forgotten. A request counts from its choice on, because a burst would otherwise see the same
    loads. Not thread-safe."""

    def __init__(self, levels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._levels = levels
        self._clock = clock
        self._index: dict[Replica, int] = {}
        self._placement = Placement(1, levels)
        self._loads: dict[Replica, tuple[float, ReplicaLoad]] = {}
        # By Ray's id of the request, which calls that depend on each other share.
        self._requests: dict[str, list[_Request]] = {}

    def update(self, loads: Mapping[Replica, ReplicaLoad | None]) -> None:
        """Take in the replicas that serve, with the load that each reports."""
        if loads.keys() != self._index.keys():
            self._set_replicas(list(loads))
        for replica, load in loads.items():
            known = self._loads.get(replica)
            if load is not None and (known is None or known[1] != load):
                self._loads[replica] = self._clock(), load
                self._report(replica)

    def forget(self, replica: Replica) -> None:
        """A replica has died."""
        if replica in self._index:
            self._set_replicas([one for one in self._index if one != replica])

    def choose(self, request: str, level: int) -> Replica | None:
        """Choose a replica and count the request there; None without replicas. A request that was
        chosen for but not sent is counted at the new choice only."""
        self.drop(request)
        if not self._index:
            return None
        self._placement.expire(self._clock())
        placed = self._placement.place(level)
        replica = list(self._index)[placed.engine]
        self._requests.setdefault(request, []).append(_Request(replica, placed))
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
        entries = self._requests.get(request, ())
        return next((entry for entry in entries if not entry.sent), None)

    def _remove(self, request: str, entry: _Request) -> None:
        self._placement.leave(entry.placed)
        entries = self._requests[request]
        entries.remove(entry)
        if not entries:
            del self._requests[request]

    def _set_replicas(self, replicas: list[Replica]) -> None:
        self._index = {replica: index for index, replica in enumerate(replicas)}
        self._placement = Placement(max(1, len(replicas)), self._levels)
        self._loads = {one: load for one, load in self._loads.items() if one in self._index}
        before, self._requests = self._requests, {}
        for request, entries in before.items():
            for entry in entries:
                if (index := self._index.get(entry.replica)) is not None:
                    entry.placed = self._placement.count(index, entry.placed.level)
                    self._requests.setdefault(request, []).append(entry)
        for replica in self._loads:
            self._report(replica)

    def _report(self, replica: Replica) -> None:
        seen, load = self._loads[replica]
        by_level = tuple(load.by_level or ())
        known = by_level if len(by_level) == self._levels else None
        report = EngineReport(seen, load.work, known, load.kv_free)
        self._placement.report(self._index[replica], report)
