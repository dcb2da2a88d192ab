"""Allocates the slots of the host pool."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class HostPool:
    """Allocates slots 0 to `slots` - 1, one per KV block, in as few runs as possible.

    Copies proceed run by run, so long runs are faster, but fragmentation never makes an allocation
    fail. Free runs are sorted; there are about as many as host copies.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        self._runs: list[tuple[int, int]] = [(0, slots)] if slots else []  # start, end

    @property
    def used(self) -> int:
        """Slots that are allocated."""
        return self.slots - self.free

    @property
    def fragmentation(self) -> float:
        """Share of the free slots outside the longest free run, 0 to 1."""
        longest = max((end - start for start, end in self._runs), default=0)
        return 1.0 - longest / self.free if self.free else 0.0

    def allocate(self, count: int) -> list[range] | None:
        """Allocate slots for `count` blocks: the shortest sufficient run, else the longest runs.

        Returns:
            None, and nothing is allocated, if too few slots are free.
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
        """Free slots from `allocate`; adjacent free runs are merged."""
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
