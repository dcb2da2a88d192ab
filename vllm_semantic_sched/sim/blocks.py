"""The pool of KV blocks."""

from __future__ import annotations

# Number of blocks if the engine's memory is not modeled.
UNLIMITED = 1 << 60


class BlockPool:
    """KV blocks of `block_size` tokens each; `blocks` None: unlimited."""

    def __init__(self, blocks: int | None, block_size: int) -> None:
        self.limited = blocks is not None
        self.total = UNLIMITED if blocks is None else blocks
        self.free = self.total
        self.block_size = block_size

    @property
    def use(self) -> float:
        """Share of the blocks in use."""
        return (self.total - self.free) / self.total if self.limited else 0.0

    def needed(self, tokens: int) -> int:
        """Blocks for the KV of this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, blocks: int) -> bool:
        """Allocate blocks; False, without any, if there are not enough."""
        if blocks > self.free:
            return False
        self.free -= blocks
        return True

    def give_back(self, blocks: int) -> None:
        """Return blocks that were allocated."""
        self.free += blocks
        assert self.free <= self.total, "more blocks returned than there are"
