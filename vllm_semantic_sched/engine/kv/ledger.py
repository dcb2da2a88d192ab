"""The scheduler's half of the swap connector, without vLLM: what each request has on the host, and
the next step's copies. It knows KV by block number."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from vllm_semantic_sched.engine.clock import monotonic


class HostPool:
    """Allocates slots 0 to `slots` - 1 of the host pool, one per KV block, in as few runs as
    possible: long runs are copied faster. Fragmentation never makes an allocation fail."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        self._runs = [range(slots)] if slots else []  # free, in order; about as many as host copies

    @property
    def used(self) -> int:
        """Slots that are allocated."""
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
            place = self._runs.index(run)
            if len(run) > count:
                self._runs[place] = run[count:]
            else:
                del self._runs[place]
            part = run[:count]
            taken.append(part)
            count -= len(part)
        return taken

    def shrink(self, slots: int) -> None:
        """Have no more than so many slots; those beyond that are in use are gone once freed."""
        self.slots = min(slots, self.slots)
        self._runs = self._within(self._runs)
        self.free = sum(map(len, self._runs))

    def _within(self, runs: Iterable[range]) -> list[range]:
        cut = (range(run.start, min(run.stop, self.slots)) for run in runs)
        return [run for run in cut if run]

    def give_back(self, taken: Sequence[range]) -> None:
        """Free slots from `allocate`."""
        taken = self._within(taken)
        self.free += sum(map(len, taken))
        self._runs = _joined(sorted((*self._runs, *taken), key=attrgetter("start")))


def _joined(runs: Iterable[range]) -> list[range]:
    """The same slots in fewer runs: those that begin where the one before ends are joined to it."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


@dataclass(slots=True)
class Transfer:
    """Blocks to copy: `device[i]` and the i-th slot of `host` belong together."""

    request_id: str
    device: list[int]
    host: list[range]
    beside: bool = False  # steps do not wait for it
    number: int | None = None  # of a save beside steps, in `KeptBlocks`

    @property
    def slots(self) -> Iterator[int]:
        """The slots of `host`, one by one."""
        return itertools.chain.from_iterable(self.host)


@dataclass(slots=True)
class Orders:
    """What the workers copy in one step: saves before anything is overwritten, loads before the
    forward pass, and those beside steps while it runs."""

    saves: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)


@dataclass(slots=True)
class HostCopy:
    """KV of tokens `start` to `end` of a request on the host."""

    start: int
    end: int
    still_valid: Callable[[], bool]  # whether the request still has the tokens that were saved
    slots: dict[tuple[int, int], int]  # by KV cache group and position in its block table
    taken: list[range]  # the same slots, as the pool returned them


class Loaded(NamedTuple):
    """A load that was ordered."""

    tokens: int
    ordered: float  # seconds on the monotonic clock


class KeptBlocks:
    """Blocks of victims that stay allocated until all workers have saved them. `free` frees
    blocks, in the form in which `add` gets them."""

    def __init__(self, free: Callable[[Any], None], workers: int = 1) -> None:
        self._free = free
        self._workers = workers
        # By number of the save: blocks, and how many workers have not reported it.
        self._kept: dict[int, tuple[Any, int]] = {}
        self._numbers = itertools.count(1)

    def add(self, blocks: Any) -> int:
        """Take over blocks; the number of their save."""
        number = next(self._numbers)
        self._kept[number] = blocks, self._workers
        return number

    def saved(self, numbers: list[int]) -> None:
        """Note, and remove, saves that workers have ended; blocks already freed are ignored."""
        while numbers:
            number = numbers.pop()
            blocks, missing = self._kept.get(number, (None, 0))
            if missing > 1:
                self._kept[number] = blocks, missing - 1
            else:
                self.free(number)

    def free(self, number: int | None) -> None:
        """Free the blocks of a save that is not needed, if any are still kept."""
        if number in self._kept:
            blocks, _ = self._kept.pop(number)
            self._free(blocks)

    def free_all(self) -> None:
        """Free all blocks, when no copy is needed: a save under way may read others' data."""
        for number in list(self._kept):
            self.free(number)


class SwapLedger:
    """Host copies of preempted requests. `block_sizes`: tokens per block, by KV cache group. The
    slots of a load become free one step later, when the workers have copied them, or for a load
    beside steps when the workers report it."""

    def __init__(self, pool: HostPool, block_sizes: Sequence[int]) -> None:
        self.pool = pool
        # Whether to load this many tokens beside the engine's steps.
        self.loads_beside: Callable[[int], bool] = lambda tokens: False
        self.kept = KeptBlocks(lambda blocks: None)  # saved beside the engine's steps
        self.null_block = 0  # the number that means "no block"
        self.saved: dict[str, HostCopy] = {}  # not ordered to be loaded, by request
        self.loading: dict[str, HostCopy] = {}  # beside steps, not reported by the workers yet
        self._block_sizes = tuple(block_sizes)
        self._spent: list[HostCopy] = []
        self.loaded: dict[str, Loaded] = {}  # the last load ordered, by request, until it is seated
        self._orders = Orders()

    def __len__(self) -> int:
        return len(self.saved)

    def save(
        self,
        request_id: str,
        blocks: Sequence[Sequence[int]],
        start: int,
        end: int,
        still_valid: Callable[[], bool],
        keep: Callable[[list[int]], Any] | None = None,
    ) -> bool:
        """Order a save of KV for tokens `start` (at the beginning of a block) to `end` in the
        coming step; False, and no order, if the pool has too few free slots. `blocks`: the
        request's block table, by group. `keep`: for a save beside steps, keeps blocks allocated,
        and returns them as `KeptBlocks` frees them."""
        self.release(request_id)
        places = self._places(blocks, start, end)
        taken = self.pool.allocate(len(places))
        if taken is None:
            return False
        slots = dict(zip(places, itertools.chain.from_iterable(taken), strict=True))
        self.saved[request_id] = HostCopy(
            start=start, end=end, still_valid=still_valid, slots=slots, taken=taken
        )
        save = Transfer(request_id, list(places.values()), taken)
        if keep is not None:
            save.beside = True
            save.number = self.kept.add(keep(save.device))
        self._orders.saves.append(save)
        return True

    def _places(
        self, blocks: Sequence[Sequence[int]], start: int, end: int
    ) -> dict[tuple[int, int], int]:
        """The blocks of tokens `start` to `end`, by group and position. Those before a sliding
        window are absent and never read."""
        places = {}
        for group, (table, size) in enumerate(zip(blocks, self._block_sizes, strict=True)):
            for position in range(start // size, -(-end // size)):
                block = table[position]
                if block != self.null_block:
                    places[group, position] = block
        return places

    def loadable(self, request_id: str, on_device: int, tokens: int) -> tuple[int | None, bool]:
        """How many of a request's `tokens` can be loaded after the first `on_device`, and whether
        the load runs beside steps; the last token is always computed. None tokens if the save
        itself has not been sent to the workers yet. Changes nothing."""
        copy = self.saved.get(request_id)
        if copy is None or on_device < copy.start or not copy.still_valid():
            return 0, False
        if any(save.request_id == request_id for save in self._orders.saves):
            return None, False
        count = min(copy.end, tokens - 1) - on_device
        if count <= 0:
            return 0, False
        return count, self.loads_beside(count)

    def admitted(
        self, request_id: str, blocks: Sequence[Sequence[int]], count: int, tokens: int
    ) -> None:
        """Order the load of `count` tokens, as `loadable` said, for a request that got its blocks
        (`blocks`: its new block table, by group); forget its copy if `count` is 0."""
        copy = self.saved.get(request_id)
        if copy is None:
            return
        if count == 0:
            self.release(request_id)
            return
        end = min(copy.end, tokens - 1)
        places = self._places(blocks, end - count, end)
        device = []
        host = []
        for place, block in places.items():
            slot = copy.slots.get(place)
            if slot is not None:
                device.append(block)
                host.append(range(slot, slot + 1))
        beside = self.loads_beside(count)
        load = Transfer(request_id, device, _joined(host), beside)
        # From here on nothing can fail: the copy stays, or its load is ordered.
        del self.saved[request_id]
        self.loaded[request_id] = Loaded(count, monotonic())
        self._orders.loads.append(load)
        if beside:
            self.loading[request_id] = copy
        else:
            self._spent.append(copy)

    def take_orders(self, overwritten: Iterable[int] = ()) -> Orders:
        """The copies of the coming step. Saves of blocks that the workers may write before they
        save (`overwritten`) are abandoned."""
        for block in set(overwritten):
            for save in [save for save in self._orders.saves if block in save.device]:
                self.release(save.request_id)
        while self._spent:
            self.pool.give_back(self._spent.pop().taken)
        return self.cancel_orders()

    def cancel_orders(self) -> Orders:
        """Take back the copies of the coming step, after an error. The caller must release the
        copies that will not be saved, and end the loads beside steps."""
        orders = self._orders
        self._orders = Orders()
        return orders

    def distrust(self) -> None:
        """Load none of the copies any more."""
        for copy in self.saved.values():
            copy.still_valid = lambda: False

    def load_finished(self, request_ids: Iterable[str]) -> None:
        """Free the slots of loads finished beside steps; unknown ids are ignored."""
        for request_id in request_ids:
            copy = self.loading.pop(request_id, None)
            if copy is not None:
                self.pool.give_back(copy.taken)

    def release(self, request_id: str) -> None:
        """Forget a request's copy, if any. A load in flight continues."""
        self.loaded.pop(request_id, None)
        copy = self.saved.pop(request_id, None)
        if copy is None:
            return
        # A save that was not sent yet must not write into slots that another request gets.
        for save in [save for save in self._orders.saves if save.request_id == request_id]:
            self._orders.saves.remove(save)
            self.kept.free(save.number)
        self.pool.give_back(copy.taken)

    def release_all(self) -> list[str]:
        """Forget all copies, made or not; the ids of the requests that had one."""
        self.distrust()
        lost = list(self.saved)
        for request_id in lost:
            self.release(request_id)
        # A load under way may still wait for its save.
        if not (self.loading or self._spent):
            self.kept.free_all()
        return lost
