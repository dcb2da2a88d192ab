"""What each KV block of the emulated device stands for, and the checks that a GPU cannot make: a
step that reads a block with other content than its request's prefix gives a wrong answer there, and
an error here.

The content of a slot is the hash chain of all tokens up to its own, with the LoRA adapter and the
images that went into them. A table remembers how far it was checked; a write by another request
makes it be checked again, so that a decoding step costs O(1) for each request.

A block of a Mamba layer has one slot: the state after a token, which is the hash of the chain
there. A step reads the state where the last one left it, in the block of the last computed token,
and leaves its own in the block of its last token, which may be another.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

NULL_BLOCK = 0  # vLLM's "no block": what lies before a sliding window


Content = tuple[int, list[int | None]]
"""A block's group, and for each slot the hash chain of the tokens up to it; None: nothing."""


class DeviceError(RuntimeError):
    """The scheduler asked for what a GPU would silently get wrong.

    Attributes:
        request, step, block: where it was found; None where there is no such thing.
        owners: the last three that wrote into the block, latest last.
    """

    def __init__(
        self,
        problem: str,
        request: str | None = None,
        step: int | None = None,
        block: int | None = None,
        owners: Sequence[str] = (),
    ) -> None:
        place = [
            f"{name} {value}"
            for name, value in (("step", step), ("request", request), ("block", block))
            if value is not None
        ]
        last = ""
        if block is not None:
            last = f" (last written by {', '.join(owners) or 'nobody'})"
        super().__init__(f"{', '.join(place)}: {problem}{last}")
        self.request = request
        self.step = step
        self.block = block
        self.owners = tuple(owners)


@dataclass(frozen=True)
class Group:
    """A group of layers that share a block table. `window`: tokens that they see, if not all.
    `state`: a block holds the state after one token instead of the KV of each (Mamba). `exported`:
    whether a step that computes tokens from one place to another also leaves the state of a place
    between them, as that place and the number of the block in the table. `checked`: not where
    drafts are verified on states, each of which vLLM keeps in a block of its own."""

    block_size: int
    window: int | None = None
    state: bool = False
    exported: Callable[[int, int], tuple[int, int] | None] = lambda start, end: None
    checked: bool = True


class Chain:
    """The hash chain of a request's tokens. `salt`: the adapter; `images`: by their first token."""

    def __init__(
        self, tokens: list[int], salt: int = 0, images: dict[int, int] | None = None
    ) -> None:
        self.tokens = tokens  # the request's own list, which grows
        self.hashes: list[int] = []
        self._salt = salt
        self._images = images or {}

    def upto(self, end: int) -> list[int]:
        """The hashes of at least the first `end` tokens."""
        hashes = self.hashes
        last = hashes[-1] if hashes else hash((self._salt,))
        for place in range(len(hashes), end):
            image = self._images.get(place)
            token = self.tokens[place]
            last = hash((last, token)) if image is None else hash((last, token, image))
            hashes.append(last)
        return hashes

    def truncate(self, end: int) -> None:
        """Forget the tokens from `end` on."""
        del self.tokens[end:]
        del self.hashes[end:]


@dataclass(eq=False)
class Table:
    """A request's blocks, by group, and how many of its tokens are known to be in them."""

    request: str
    chain: Chain
    blocks: list[list[int]]
    checked: list[int]
    stale: bool = False  # another request wrote into one of the blocks


@dataclass(eq=False)
class Copy:
    """A copy beside the steps."""

    what: str  # of which request
    begin: float
    end: float


@dataclass(eq=False)
class _Block:
    slots: list[int | None]
    group: int = -1
    owners: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    readers: set[Table] = field(default_factory=set)
    saving: Copy | None = None  # the last copy out of it
    loading: Copy | None = None  # the last copy into it


class Sanitizer:
    """The contents of the device's blocks and of the host's slots. Raises DeviceError."""

    def __init__(self, groups: Sequence[Group], blocks: int) -> None:
        self.groups = list(groups)
        self.total = blocks
        self.step = 0
        self._begin = 0.0
        self._blocks: dict[int, _Block] = {}
        self._host: dict[Hashable, Content] = {}
        self._written: dict[int, str] = {}  # in this step, by block
        self._arriving: deque[tuple[Copy, int, Content]] = deque()

    # Block tables

    def table(self, request: str, chain: Chain, blocks: Sequence[Sequence[int]]) -> Table:
        """The block table of a request that begins or resumes."""
        if len(blocks) != len(self.groups):
            raise self._error(f"{len(blocks)} groups of blocks for {len(self.groups)}", request)
        table = Table(request, chain, [[] for _ in blocks], [0] * len(blocks))
        self.extend(table, blocks)
        return table

    def extend(self, table: Table, blocks: Sequence[Sequence[int]]) -> None:
        """Append blocks to a table."""
        for group, more in enumerate(blocks):
            for block in more:
                if not 0 <= block < self.total:
                    raise self._error(
                        f"there is no such block, only {self.total}", table.request, block
                    )
                if block != NULL_BLOCK:
                    self._block(block).readers.add(table)
            table.blocks[group].extend(more)

    def drop(self, table: Table) -> None:
        """The request has ended, or gets another table."""
        for block in {block for blocks in table.blocks for block in blocks}:
            if block in self._blocks:
                self._blocks[block].readers.discard(table)

    # A step

    def begin_step(self, number: int, begin: float) -> None:
        """A step that begins at that second; the calls that follow belong to it."""
        self.step = number
        self._begin = begin
        self._written.clear()
        self._settle(begin)

    def compute(self, table: Table, start: int, end: int) -> None:
        """A request reads the KV of its tokens before `start` and writes those up to `end`."""
        for number, group in enumerate(self.groups):
            if not group.checked:
                continue
            self._room(table, number, end)
            if group.state:
                self._advance(table, number, start, end)
                continue
            self._read(table, number, start)
            self._write(table, number, start, end)
        table.stale = False

    def forget(self, table: Table, end: int) -> None:
        """The tokens from `end` on were drafts, and are wrong."""
        table.checked[:] = [min(checked, end) for checked in table.checked]

    def clear(self, blocks: Iterable[int]) -> None:
        """The step zeroes these blocks first."""
        for block in blocks:
            entry = self._block(block)
            self._free_of_copies(entry, block, "zeroes", None)
            entry.slots = [None] * len(entry.slots)

    def duplicate(self, source: int, target: int) -> None:
        """The step copies a block within the device first (copy on write)."""
        entry = self._block(source)
        self._free_of_copies(self._block(target), target, "copies over", None)
        self._put(target, (entry.group, list(entry.slots)), f"a copy of block {source}")

    # Copies between device and host, in the order of the device's copy queue

    def copy_out(
        self, block: int, slot: Hashable, begin: float, end: float, what: str, beside: bool
    ) -> None:
        """Copy a block to a slot of the host."""
        entry = self._source(block, begin, what)
        self._host[slot] = (entry.group, list(entry.slots))
        if beside:
            entry.saving = Copy(what, begin, end)

    def copy_in(
        self, block: int, slot: Hashable, begin: float, end: float, what: str, beside: bool
    ) -> None:
        """Copy a slot of the host to a block."""
        if slot not in self._host:
            raise self._error(f"{what} reads slot {slot} of the host, which is empty", None, block)
        self.fill(block, self._host[slot], begin, end, what, beside)

    def fill(
        self, block: int, content: Content, begin: float, end: float, what: str, beside: bool
    ) -> None:
        """Copy that content to a block, from wherever it is."""
        entry = self._block(block)
        if entry.saving is not None and entry.saving.end > begin:
            raise self._error(f"{what} overwrites what {entry.saving.what} copies", None, block)
        if beside:
            entry.loading = Copy(what, begin, end)
            self._arriving.append((entry.loading, block, content))
        else:
            self._put(block, content, what)

    def send(self, block: int, content: Content, begin: float, end: float, what: str) -> None:
        """Copy a block away beside the steps, as somebody will use it for that content; None there:
        of no use."""
        entry = self._source(block, begin, what)
        group, wanted = content
        right = entry.group == group and all(
            slot in (None, has) for slot, has in zip(wanted, entry.slots, strict=True)
        )
        if not right:
            raise self._error(f"{what} reads the KV of other tokens", None, block)
        entry.saving = Copy(what, begin, end)

    def owners(self, block: int) -> tuple[str, ...]:
        """The last three that wrote into a block."""
        return tuple(self._blocks[block].owners) if block in self._blocks else ()

    # Ours

    def _source(self, block: int, begin: float, what: str) -> _Block:
        """A block that a copy reads which begins then."""
        entry = self._block(block)
        if entry.loading is not None and entry.loading.end > begin:
            raise self._error(
                f"{what} reads a block before {entry.loading.what} has filled it", None, block
            )
        self._settle(begin)
        return entry

    def _settle(self, moment: float) -> None:
        """Put down what has arrived by then."""
        while self._arriving and self._arriving[0][0].end <= moment:
            copy, block, content = self._arriving.popleft()
            self._put(block, content, copy.what)

    def _block(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = _Block([None] * self.groups[0].block_size)
        return block

    def _put(self, number: int, content: Content, owner: str) -> None:
        block = self._block(number)
        group, slots = content
        block.group = group
        block.slots = list(slots)
        block.owners.append(owner)
        for reader in block.readers:
            reader.stale = True

    def _room(self, table: Table, group: int, end: int) -> None:
        blocks = table.blocks[group]
        size = self.groups[group].block_size
        if end > len(blocks) * size:
            raise self._error(
                f"computes {end} tokens with {len(blocks)} blocks of {size}", table.request
            )

    def _read(self, table: Table, group: int, start: int) -> None:
        checked = 0 if table.stale else min(table.checked[group], start)
        window = self.groups[group].window
        first = checked if window is None else max(checked, start - window + 1)
        if first >= start:
            return
        size = self.groups[group].block_size
        hashes = table.chain.upto(start)
        for place in range(first // size, -(-start // size)):
            begin = place * size
            low = max(first, begin)
            high = min(start, begin + size)
            number = table.blocks[group][place]
            if number == NULL_BLOCK:
                raise self._error(f"has no KV for tokens {low} to {high}", table.request)
            block = self._block(number)
            self._arrived(block, number, table.request)
            slots = block.slots[low - begin : high - begin]
            if slots != hashes[low:high] or block.group != group:
                what = "nothing was" if None in slots else "the KV of other tokens was"
                raise self._error(
                    f"reads tokens {low} to {high} where {what} written", table.request, number
                )
        table.checked[group] = start

    def _write(self, table: Table, group: int, start: int, end: int) -> None:
        size = self.groups[group].block_size
        hashes = table.chain.upto(end)
        for place in range(start // size, -(-end // size)):
            begin = place * size
            low = max(start, begin)
            high = min(end, begin + size)
            number = table.blocks[group][place]
            if number == NULL_BLOCK:
                raise self._error(f"has no block for token {low}", table.request)
            block = self._open(table, group, number, size)
            block.slots[low - begin : high - begin] = hashes[low:high]
        table.checked[group] = end

    def _advance(self, table: Table, group: int, start: int, end: int) -> None:
        """From the state after `start` tokens to that after `end`."""
        if start:
            self._read_state(table, group, start)
        exported = self.groups[group].exported(start, end)
        if exported is not None:
            after, place = exported
            if table.blocks[group][place] != NULL_BLOCK:  # else it is written to nowhere
                self._write_state(table, group, after, place)
        self._write_state(table, group, end, (end - 1) // self.groups[group].block_size)

    def _read_state(self, table: Table, group: int, after: int) -> None:
        number = table.blocks[group][(after - 1) // self.groups[group].block_size]
        if number == NULL_BLOCK:
            raise self._error(f"has no state after {after} tokens", table.request)
        block = self._block(number)
        self._arrived(block, number, table.request)
        if block.group != group or block.slots != [table.chain.upto(after)[after - 1]]:
            what = "nothing was" if None in block.slots else "another state was"
            raise self._error(
                f"reads the state after {after} tokens where {what} written", table.request, number
            )

    def _write_state(self, table: Table, group: int, after: int, place: int) -> None:
        number = table.blocks[group][place]
        if number == NULL_BLOCK:
            raise self._error(f"has no block for the state after {after} tokens", table.request)
        block = self._open(table, group, number, 1)
        block.slots[0] = table.chain.upto(after)[after - 1]

    def _open(self, table: Table, group: int, number: int, size: int) -> _Block:
        """A block that a request writes in this step."""
        block = self._block(number)
        self._arrived(block, number, table.request)
        self._free_of_copies(block, number, "writes", table.request)
        writer = self._written.setdefault(number, table.request)
        if writer != table.request:
            raise self._error(
                f"writes a block that {writer} writes in the same step", table.request, number
            )
        if block.group != group or len(block.slots) != size:
            block.group = group
            block.slots = [None] * size
        if not block.owners or block.owners[-1].split(" in step ")[0] != table.request:
            block.owners.append(f"{table.request} in step {self.step}")
        if len(block.readers) > 1:
            for reader in block.readers - {table}:
                reader.stale = True
        return block

    def _arrived(self, block: _Block, number: int, request: str) -> None:
        if block.loading is not None:
            if block.loading.end > self._begin:
                raise self._error(
                    f"uses a block before {block.loading.what} ended", request, number
                )
            block.loading = None

    def _free_of_copies(self, block: _Block, number: int, doing: str, request: str | None) -> None:
        if block.saving is not None:
            if block.saving.end > self._begin:
                raise self._error(
                    f"{doing} a block while {block.saving.what} is under way", request, number
                )
            block.saving = None

    def _error(self, problem: str, request: str | None, block: int | None = None) -> DeviceError:
        owners = () if block is None else self.owners(block)
        return DeviceError(problem, request, self.step, block, owners)
