"""Chooses the engine of a request among several: an engine serves by urgency, so a request goes
where the fewest are at least as urgent."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Engines report a few times per second. By then most requests of an older report have finished.
_FRESH = 2.0  # seconds

# By how many requests, at least as urgent, a session's engine may exceed the least loaded one and
# still get the session's next request. Each of them costs it about the time of an answer divided by
# the seats, and a few thousand cached tokens save as much as a few of them. Less urgent requests do
# not count, however many: the next seat is for the most urgent one.
CACHE_WORTH = 4


class Placed(NamedTuple):
    """A request at its engine."""

    engine: int
    level: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The load of an engine in requests, whoever sent it these."""

    time: float  # of the report, in seconds of the caller's clock
    work: int  # all requests, waiting and running
    by_level: tuple[int, ...] | None = None  # the most urgent first; None: unknown
    kv_free: float | None = None  # share of the KV cache, 0 to 1; None: unknown


class Placement:
    """Sends each request to the engine with the fewest at least as urgent ones, in O(engines).

    Ties go to the engine with the fewest requests, then to the one with the most free KV, then in
    turn. It knows the requests that it has placed itself, and the others from reports. Those of
    unknown level, because a report lacks levels or is old, count as at least as urgent as any
    request: if no level is known, the least loaded engine is chosen.
    """

    def __init__(self, engines: int, levels: int) -> None:
        self.engines = engines
        # By level and engine: requests at least as urgent as that level. A choice is a minimum of a
        # row, at the speed of C.
        self.ahead = [[0] * engines for _ in range(levels)]
        # By engine and level: those of them that others have placed.
        self._others = [[0] * levels for _ in range(engines)]
        self._reported = [math.inf] * engines  # time of the latest report that counts
        self._kv_used = [0.0] * engines
        self._turn = 0

    def place(
        self, level: int, among: Sequence[int] | None = None, home: int | None = None
    ) -> Placed:
        """Choose an engine for a request, `among` some or all, and count it there until `leave`.
        `home`: the engine of its session; chosen, unless those at least as urgent there exceed the
        least loaded engine's by more than `CACHE_WORTH`. None: without it."""
        ahead = self.ahead[level]
        candidates = range(self.engines) if among is None else among
        loads = ahead if among is None else [ahead[engine] for engine in among]
        least = min(loads)
        if home is not None and home in candidates and ahead[home] - least <= CACHE_WORTH:
            return self.count(home, level)
        pairs = zip(candidates, loads, strict=True)
        tied = [engine for engine, load in pairs if load == least]
        tied = _least(_least(tied, self.ahead[-1]), self._kv_used)
        chosen = next((engine for engine in tied if engine >= self._turn), tied[0])
        self._turn = chosen + 1
        return self.count(chosen, level)

    def count(self, engine: int, level: int) -> Placed:
        """Count a request until `leave` whose engine somebody else has chosen."""
        for row in self.ahead[level:]:
            row[engine] += 1
        return Placed(engine, level)

    def leave(self, placed: Placed) -> None:
        """Forget a request that has finished. Call it once per request."""
        for row in self.ahead[placed.level :]:
            row[placed.engine] -= 1

    def count_others(self, engine: int, ahead: list[int]) -> None:
        """Set the requests of others at an engine that are at least as urgent as each level."""
        if ahead != self._others[engine]:
            for row, before, now in zip(self.ahead, self._others[engine], ahead, strict=True):
                row[engine] += now - before
            self._others[engine] = ahead

    def report(self, engine: int, report: EngineReport) -> None:
        """Take in the load of an engine; a later report replaces it. ValueError if it has another
        number of levels."""
        if report.by_level is not None and len(report.by_level) != len(self.ahead):
            raise ValueError(f"{len(report.by_level)} levels; valid: {len(self.ahead)}")
        self._reported[engine] = report.time
        self._kv_used[engine] = 0.0 if report.kv_free is None else 1.0 - report.kv_free
        before = self._others[engine]
        own = [row[engine] - theirs for row, theirs in zip(self.ahead, before, strict=True)]
        if report.by_level is None:
            others = [max(0, report.work - own[-1])] * len(own)
        else:
            # A report lags behind what was placed here meanwhile.
            reported = itertools.accumulate(report.by_level)
            others = [max(0, load - mine) for load, mine in zip(reported, own, strict=True)]
        self.count_others(engine, others)

    def expire(self, now: float) -> None:
        """Forget the levels in reports that are older than two seconds, and keep their sums."""
        for engine, time in enumerate(self._reported):
            if now - time > _FRESH:
                self._reported[engine] = math.inf
                self._kv_used[engine] = 0.0
                others = self._others[engine]
                self.count_others(engine, [others[-1]] * len(others))


def _least(engines: list[int], loads: Sequence[float]) -> list[int]:
    """Those of the engines with the smallest load."""
    if len(engines) == 1:
        return engines
    least = min([loads[engine] for engine in engines])
    return [engine for engine in engines if loads[engine] == least]
