"""The ledger of host copies: how much KV each request has on the host, and the next step's copies.

This is the scheduler's half of the swap connector, without vLLM: it knows requests by id and KV by
block number.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_semantic_sched.engine.kv.host_pool import HostPool


@dataclass(slots=True)
class Transfer:
    """Blocks to copy: `device[i]` and the i-th slot of `host` belong together. `number`: of a save
    beside steps, in `KeptBlocks`."""

    request_id: str
    device: list[int]
    host: list[range]
    number: int = 0

    @property
    def slots(self) -> Iterator[int]:
        """The slots of `host`, one by one."""
        return itertools.chain.from_iterable(self.host)


@dataclass(slots=True)
class Orders:
    """What the workers copy in one step, in this order: saves before anything is overwritten,
    loads before the forward pass, later saves and loads while it runs."""

    saves: list[Transfer] = field(default_factory=list)
    later_saves: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    later_loads: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class HostCopy:
    """KV of tokens `start` to `end` of a request on the host.

    Attributes:
        still_valid: whether the request still has the tokens that were saved.
        slots: per KV cache group, by position in the block table.
        taken: the same slots as runs, as the pool returned them.
    """

    start: int
    end: int
    still_valid: Callable[[], bool]
    slots: tuple[dict[int, int], ...]
    taken: list[range]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that was ordered. `at`: seconds on the monotonic clock."""

    tokens: int
    at: float


class KeptBlocks:
    """Blocks of victims that stay allocated until all workers have saved them.

    Args:
        free: frees blocks, in the form in which `add` gets them.
        workers: each reports each save.
    """

    def __init__(self, free: Callable[[Any], None], workers: int = 1) -> None:
        self._free, self._workers = free, workers
        self._blocks: dict[int, Any] = {}
        self._missing: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, blocks: Any) -> int:
        """Take over blocks; the number of their save."""
        number = next(self._numbers)
        self._blocks[number], self._missing[number] = blocks, self._workers
        return number

    def saved(self, numbers: list[int]) -> None:
        """Note, and remove, saves that a worker, or several, have ended; those of blocks already
        freed are ignored."""
        while numbers:
            number = numbers.pop()
            if number in self._missing:
                self._missing[number] -= 1
                if not self._missing[number]:
                    self.free(number)

    def free(self, number: int) -> None:
        """Free the blocks of a save that is not needed, if they are still kept."""
        if number in self._blocks:
            del self._missing[number]
            self._free(self._blocks.pop(number))

    def free_all(self) -> None:
        """Free all blocks, when no copy is needed any more: a save under way may read others'
        data."""
        for number in list(self._blocks):
            self.free(number)


class SwapLedger:
    """Host copies of preempted requests.

    The slots of a load become free one step later, when the workers have copied them, or for a
    load beside steps when the workers report it.

    Args:
        block_sizes: tokens per block, by KV cache group.
        null_block: the block number that means "no block".

    Attributes:
        loads_beside: whether to load this many tokens beside the engine's steps.
        kept: blocks of victims that are saved beside the engine's steps.
    """

    def __init__(self, pool: HostPool, block_sizes: Sequence[int], null_block: int = 0) -> None:
        self.pool = pool
        self.loads_beside: Callable[[int], bool] = lambda tokens: False
        self.kept = KeptBlocks(lambda blocks: None)
        self._block_sizes = tuple(block_sizes)
        self.null_block = null_block
        self._saved: dict[str, HostCopy] = {}
        self._loading: dict[str, HostCopy] = {}
        self._spent: list[HostCopy] = []
        self._loaded: dict[str, Loaded] = {}
        self._orders = Orders()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._saved

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def saved(self) -> list[str]:
        """Requests whose KV is on the host and not ordered to be loaded."""
        return list(self._saved)

    @property
    def loading(self) -> list[str]:
        """Requests whose load beside steps the workers have not reported yet."""
        return list(self._loading)

    @property
    def slots_in_use(self) -> list[int]:
        """Slots of all copies, including those that are being loaded."""
        copies = [*self._saved.values(), *self._loading.values(), *self._spent]
        return [slot for copy in copies for run in copy.taken for slot in run]

    def save(
        self,
        request_id: str,
        blocks: Sequence[Sequence[int]],
        start: int,
        end: int,
        still_valid: Callable[[], bool],
        keep: Callable[[list[int]], int] | None = None,
    ) -> bool:
        """Order a save of KV for tokens `start` to `end` in the coming step.

        Args:
            blocks: the request's block table, by group.
            start: first token, at the beginning of a block.
            keep: keeps these blocks allocated (`KeptBlocks.add`) for a save beside steps.

        Returns:
            False, and nothing is ordered, if the pool has too few free slots.
        """
        self.release(request_id)
        positions = [
            [
                position
                for position in range(start // size, -(-end // size))
                if table[position] != self.null_block
            ]
            for table, size in zip(blocks, self._block_sizes, strict=True)
        ]
        taken = self.pool.allocate(sum(map(len, positions)))
        if taken is None:
            return False
        slots = (slot for run in taken for slot in run)
        copy = HostCopy(
            start,
            end,
            still_valid,
            tuple({position: next(slots) for position in group} for group in positions),
            taken,
        )
        device = [
            table[position]
            for table, group in zip(blocks, positions, strict=True)
            for position in group
        ]
        self._saved[request_id] = copy
        if keep is None:
            self._orders.saves.append(Transfer(request_id, device, taken))
        else:
            self._orders.later_saves.append(Transfer(request_id, device, taken, keep(device)))
        return True

    def loadable(self, request_id: str, on_device: int, tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the first `on_device` can be loaded, and whether the load runs
        beside steps. Changes nothing.

        Args:
            tokens: tokens that the request has; the last one is always computed.

        Returns:
            None tokens if the save itself has not been sent to the workers yet.
        """
        copy = self._saved.get(request_id)
        if copy is None or on_device < copy.start or not copy.still_valid():
            return 0, False
        saves = itertools.chain(self._orders.saves, self._orders.later_saves)
        if any(save.request_id == request_id for save in saves):
            return None, False
        count = min(copy.end, tokens - 1) - on_device
        return (count, self.loads_beside(count)) if count > 0 else (0, False)

    def admitted(
        self, request_id: str, blocks: Sequence[Sequence[int]], count: int, tokens: int
    ) -> None:
        """Order the load of `count` tokens, as `loadable` said, for a request that got its blocks;
        forget its copy if `count` is 0.

        Args:
            blocks: the request's new block table, by group.
        """
        copy = self._saved.get(request_id)
        if copy is None:
            return
        if count == 0:
            self.release(request_id)
            return
        end = min(copy.end, tokens - 1)
        device: list[int] = []
        host: list[int] = []
        for table, size, slots in zip(blocks, self._block_sizes, copy.slots, strict=True):
            for position in range((end - count) // size, -(-end // size)):
                # Blocks before a sliding window are absent on both sides and never read.
                if position in slots and table[position] != self.null_block:
                    device.append(table[position])
                    host.append(slots[position])
        transfer = Transfer(request_id, device, _runs(host))
        beside = self.loads_beside(count)
        # From here on nothing can fail: the copy stays, or its load is ordered.
        del self._saved[request_id]
        self._loaded[request_id] = Loaded(count, time.monotonic())
        if beside:
            self._orders.later_loads.append(transfer)
            self._loading[request_id] = copy
        else:
            self._orders.loads.append(transfer)
            self._spent.append(copy)

    def take_orders(self, overwritten: Iterable[int] = ()) -> Orders:
        """The copies of the coming step.

        Args:
            overwritten: blocks that the workers may write before they save; their saves are
                abandoned.
        """
        for block in set(overwritten):
            for save in [save for save in self._orders.saves if block in save.device]:
                self.release(save.request_id)
        while self._spent:
            self.pool.give_back(self._spent.pop().taken)
        orders, self._orders = self._orders, Orders()
        return orders

    def cancel_orders(self) -> Orders:
        """Take back the copies of the coming step, after an error. The caller must release the
        copies that will not be saved, and end the loads beside steps."""
        orders, self._orders = self._orders, Orders()
        return orders

    def distrust(self) -> None:
        """Load none of the copies any more."""
        for copy in self._saved.values():
            copy.still_valid = lambda: False

    def take_loaded(self, request_id: str) -> Loaded | None:
        """Remove and return the last load ordered for a request."""
        return self._loaded.pop(request_id, None)

    def load_finished(self, request_ids: Iterable[str]) -> None:
        """Free the slots of loads that the workers finished beside steps; unknown ids are
        ignored."""
        for request_id in request_ids:
            copy = self._loading.pop(request_id, None)
            if copy is not None:
                self.pool.give_back(copy.taken)

    def release(self, request_id: str) -> None:
        """Forget a request's copy, if any. A load in flight continues."""
        self._loaded.pop(request_id, None)
        copy = self._saved.pop(request_id, None)
        if copy is not None:
            self._discard(request_id, copy)

    def release_all(self) -> list[str]:
        """Forget all copies, made or not; the ids of the requests that had one."""
        self.distrust()
        lost = self.saved
        for request_id in lost:
            self.release(request_id)
        # A load under way may still wait for its save.
        if not (self._loading or self._spent):
            self.kept.free_all()
        return lost

    def _discard(self, request_id: str, copy: HostCopy) -> None:
        # A save that was not sent yet must not write into slots that another request gets.
        orders = self._orders
        orders.saves = [save for save in orders.saves if save.request_id != request_id]
        for save in [save for save in orders.later_saves if save.request_id == request_id]:
            orders.later_saves.remove(save)
            self.kept.free(save.number)
        self.pool.give_back(copy.taken)


def _runs(slots: Sequence[int]) -> list[range]:
    runs: list[range] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = range(runs[-1].start, slot + 1)
        else:
            runs.append(range(slot, slot + 1))
    return runs
