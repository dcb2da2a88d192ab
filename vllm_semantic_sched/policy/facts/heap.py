"""A binary heap whose items can be found, re-keyed and removed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T", bound=Hashable)
_heappush = heapq.heappush  # called several times per request
_heappop = heapq.heappop
_heaps: WeakSet[AddressableHeap[Any]] = WeakSet()


def stored_entries() -> int:
    """Entries of all heaps of this process, live and dead: it must not grow with time."""
    return sum(len(heap._entries) for heap in tuple(_heaps))


class AddressableHeap(Generic[T]):
    """Min-heap of items under keys that stay frozen while they are stored.

    Removal leaves a dead entry in place. Dead entries are dropped when they reach the top, or
    together when they outnumber the live ones, so every operation is O(log n) amortized. Items
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
        live = self._live
        entries = self._entries
        entry = (key, self._tick(), item)
        moved = item in live
        live[item] = entry
        _heappush(entries, entry)
        if moved:
            if len(entries) > 2 * len(live) + self._SLACK:
                self._compact()
            return True
        first = entries[0]
        if first is entry:
            return True
        # Without dead entries the first one is not dead, either: as on nearly all arrivals.
        return len(entries) != len(live) and live.get(first[2]) is not first

    def discard(self, item: T) -> bool:
        """Remove `item`; False if it was not stored."""
        live = self._live
        if live.pop(item, None) is None:
            return False
        if len(self._entries) > 2 * len(live) + self._SLACK:
            self._compact()
        return True

    def peek(self) -> T | None:
        """The item under the smallest key; None if empty."""
        entries = self._entries
        if not entries:
            return None
        if self._live.get(entries[0][2]) is not entries[0]:
            self._drop_dead_top()
        return entries[0][2] if entries else None

    def first(self) -> tuple[Any, T] | None:
        """The smallest key and its item; None if empty."""
        item = self.peek()
        return None if item is None else (self._entries[0][0], item)

    def pop(self) -> T:
        """Remove and return the item under the smallest key. IndexError if empty."""
        self._drop_dead_top()
        item = _heappop(self._entries)[2]
        del self._live[item]
        return item

    def may_reach(self, key: Any) -> bool:
        """Whether an item may be stored under a key up to `key`; a False is certain."""
        return bool(self._entries) and bool(self._entries[0][0] <= key)

    def pop_until(self, key: Any, most: int) -> Iterator[T]:
        """Remove and yield at most `most` items under keys up to `key`; the heap may change."""
        if not self.may_reach(key):  # as in most steps
            return iter(())
        return self._pop_until(key, most)

    def _pop_until(self, key: Any, most: int) -> Iterator[T]:
        for _ in range(most):
            item = self.peek()
            if item is None or self._live[item][0] > key:
                return
            yield self.pop()

    def ordered(self) -> Iterator[tuple[Any, T]]:
        """Keys and items by rising key, k of them in O(k log k); the heap must not change
        meanwhile."""
        entries = self._entries
        live = self._live
        frontier = [(entries[0], 0)] if entries else []
        while frontier:
            entry, index = _heappop(frontier)
            key, _, item = entry
            if live.get(item) is entry:
                yield key, item
            child = 2 * index + 1
            for below in entries[child : child + 2]:
                _heappush(frontier, (below, child))
                child += 1

    def _drop_dead_top(self) -> None:
        entries = self._entries
        while entries and self._live.get(entries[0][2]) is not entries[0]:
            _heappop(entries)

    def _compact(self) -> None:
        self._entries = list(self._live.values())
        heapq.heapify(self._entries)
