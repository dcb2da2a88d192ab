"""A binary heap whose items can be found, re-keyed and removed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T", bound=Hashable)
_heappush = heapq.heappush  # each new request is pushed several times
_heaps: WeakSet[AddressableHeap[Any]] = WeakSet()


def stored_entries() -> int:
    """Entries of all heaps of this process, live and dead: it must not grow with time."""
    return sum(len(heap._entries) for heap in tuple(_heaps))


class AddressableHeap(Generic[T]):
    """Min-heap of items under keys that stay frozen while they are stored.

    Removal leaves a dead entry in place. Dead entries are dropped when they reach the top, or
    together when they outnumber the live ones, so every operation is O(log n) amortised. Items
    under equal keys leave in the order of their pushes and are never compared.
    """

    _SLACK = 64  # dead entries allowed in a small heap, to avoid frequent rebuilds

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._live: dict[T, tuple[Any, int, T]] = {}
        self._tick = itertools.count().__next__
        _heaps.add(self)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[T]:
        """The items, in no particular order."""
        return iter(self._live)

    def key(self, item: T) -> Any:
        """The key of `item`. KeyError if it is not stored."""
        return self._live[item][0]

    def push(self, item: T, key: Any) -> bool:
        """Store `item` under `key`, or change its key. False only if `peek` returns the same item
        under the same key as before."""
        live, entries = self._live, self._entries
        entry = (key, self._tick(), item)
        moved = item in live
        live[item] = entry
        _heappush(entries, entry)
        if moved:
            self._compact_if_sparse()
            return True
        return entries[0] is entry or live.get(entries[0][2]) is not entries[0]

    def discard(self, item: T) -> bool:
        """Remove `item`; False if it was not stored."""
        if self._live.pop(item, None) is None:
            return False
        self._compact_if_sparse()
        return True

    def peek(self) -> T | None:
        """The item under the smallest key; None if empty."""
        entries = self._entries
        if not entries:
            return None
        if self._live.get(entries[0][2]) is not entries[0]:
            self._drop_dead_top()
        return entries[0][2] if entries else None

    def pop(self) -> T:
        """Remove and return the item under the smallest key. IndexError if empty."""
        self._drop_dead_top()
        item = heapq.heappop(self._entries)[2]
        del self._live[item]
        return item

    def pop_until(self, key: Any, most: int) -> Iterator[T]:
        """Remove and yield at most `most` items under keys up to `key`; the heap may change
        during the iteration."""
        # Fast path for most steps. The key of a dead entry is a lower bound as well.
        if not self._entries or self._entries[0][0] > key:
            return iter(())
        return self._pop_until(key, most)

    def _pop_until(self, key: Any, most: int) -> Iterator[T]:
        for _ in range(most):
            item = self.peek()
            if item is None or self._live[item][0] > key:
                return
            yield self.pop()

    def ordered(self) -> Iterator[T]:
        """Yield the items by rising key: the first k cost O(k log k). The heap must not change
        during the iteration."""
        entries = self._entries
        frontier = [(entries[0], 0)] if entries else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            if self._live.get(entry[2]) is entry:
                yield entry[2]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(entries):
                    heapq.heappush(frontier, (entries[child], child))

    def _drop_dead_top(self) -> None:
        entries = self._entries
        while entries and self._live.get(entries[0][2]) is not entries[0]:
            heapq.heappop(entries)

    def _compact_if_sparse(self) -> None:
        if len(self._entries) > 2 * len(self._live) + self._SLACK:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
