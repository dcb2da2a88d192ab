"""What a replica tells the routers about its load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

_KEY = "semsched"


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Requests of a replica, on all its engines.

    Attributes:
        number: increases while there are requests, so that an unchanged load is known to be
            current; Ray passes on changes only.
        work: requests, waiting and running.
        by_level: the same per level, most urgent first; None if unknown.
        kv_free: share of the KV cache that is free, 0 to 1; None if unknown.
    """

    number: int
    work: int
    by_level: tuple[int, ...] | None = None
    kv_free: float | None = None

    @classmethod
    def of_engines(cls, statuses: Sequence[Mapping[str, Any]], before: int) -> Self:
        """The load from the status of each engine (see `engine.http.commands.status`).

        Args:
            before: `number` of the report before.
        """
        work = sum(status["running"] + status["waiting"] for status in statuses)
        levels = [status["levels"] for status in statuses]
        by_level = None
        if all(levels) and len(set(map(len, levels))) == 1:
            by_level = tuple(map(sum, zip(*levels, strict=True)))
            work = sum(by_level)
        free = [status["kv_free"] for status in statuses]
        kv_free = round(sum(free) / len(free), 2) if free else None
        return cls(before + (work > 0), work, by_level, kv_free)

    def to_stats(self) -> dict[str, Any]:
        """An entry for Ray's routing statistics."""
        by_level = None if self.by_level is None else list(self.by_level)
        fields = {"number": self.number, "work": self.work, "kv_free": self.kv_free}
        return {_KEY: {**fields, "by_level": by_level}}

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any] | None) -> Self | None:
        """The load in Ray's routing statistics; None if it is missing."""
        given = (stats or {}).get(_KEY)
        if given is None:
            return None
        by_level = given["by_level"]
        return cls(
            given["number"],
            given["work"],
            None if by_level is None else tuple(by_level),
            given["kv_free"],
        )
