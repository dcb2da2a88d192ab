"""Allocates the slots of the host pool."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from operator import attrgetter

_START = attrgetter("start")


class HostPool:
    """Allocates slots 0 to `slots` - 1, one per KV block, in as few runs as possible.

    Copies proceed run by run, so long runs are faster, but fragmentation never makes an allocation
    fail. Free runs are sorted; there are about as many as host copies.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        self._runs = [range(slots)] if slots else []

    @property
    def used(self) -> int:
        return self.slots - self.free

    @property
    def fragmentation(self) -> float:
        """Share of the free slots outside the longest free run, 0 to 1."""
        return 1.0 - max(map(len, self._runs)) / self.free if self.free else 0.0

    def allocate(self, count: int) -> list[range] | None:
        """Allocate slots for `count` blocks: the shortest sufficient run, else the longest runs;
        None, and no slots, if too few are free."""
        if count > self.free:
            return None
        self.free -= count
        taken: list[range] = []
        while count:
            fitting = [run for run in self._runs if len(run) >= count]
            run = min(fitting, key=len) if fitting else max(self._runs, key=len)
            self._runs.remove(run)
            if len(run) > count:
                bisect.insort(self._runs, run[count:], key=_START)
            taken.append(run[:count])
            count -= len(taken[-1])
        return taken

    def give_back(self, taken: Sequence[range]) -> None:
        """Free slots from `allocate`; adjacent free runs are merged."""
        for run in taken:
            self.free += len(run)
            start, end = run.start, run.stop
            place = bisect.bisect(self._runs, start, key=_START)
            if place < len(self._runs) and self._runs[place].start == end:
                end = self._runs.pop(place).stop
            if place and self._runs[place - 1].stop == start:
                place -= 1
                start = self._runs.pop(place).start
            self._runs.insert(place, range(start, end))
