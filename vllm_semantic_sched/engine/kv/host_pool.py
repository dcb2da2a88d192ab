"""Slots of the host pool: which are free, and in what pieces."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class HostPool:
    """Hands out slots 0 to `slots` - 1, one per KV block, in as few runs as it can.

    A copy goes run by run, so long runs are fast ones; a request is never refused for want of
    a long one. Free runs are kept in order; there are about as many as copies held.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        self._runs: list[tuple[int, int]] = [(0, slots)] if slots else []  # start, end

    @property
    def used(self) -> int:
        """Slots handed out."""
        return self.slots - self.free

    @property
    def fragmentation(self) -> float:
        """Share of the free slots that is outside the longest free run."""
        longest = max((end - start for start, end in self._runs), default=0)
        return 1.0 - longest / self.free if self.free else 0.0

    def take(self, count: int) -> list[range] | None:
        """Slots for `count` blocks: the shortest run that holds all, else the longest ones.

        Returns:
            None, and nothing is taken, if there are not enough.
        """
        if count > self.free:
            return None
        taken: list[range] = []
        while count:
            fitting = [run for run in self._runs if run[1] - run[0] >= count]
            if fitting:
                start, end = min(fitting, key=lambda run: run[1] - run[0])
            else:
                start, end = max(self._runs, key=lambda run: run[1] - run[0])
            self._runs.remove((start, end))
            size = min(count, end - start)
            if start + size < end:
                bisect.insort(self._runs, (start + size, end))
            taken.append(range(start, start + size))
            self.free -= size
            count -= size
        return taken

    def give_back(self, taken: Sequence[range]) -> None:
        """Return what `take` handed out; neighbouring runs become one."""
        for run in taken:
            self.free += len(run)
            start, end = run.start, run.stop
            place = bisect.bisect(self._runs, (start, end))
            if place < len(self._runs) and self._runs[place][0] == end:
                end = self._runs.pop(place)[1]
            if place and self._runs[place - 1][1] == start:
                start = self._runs.pop(place - 1)[0]
                place -= 1
            self._runs.insert(place, (start, end))
