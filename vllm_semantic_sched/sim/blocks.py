"""KV blocks: how many are free, how many a sequence needs."""

from __future__ import annotations

# Stands for "as many as anybody wants" where the engine's memory is not modelled.
UNLIMITED = 1 << 60


class BlockPool:
    """A number of KV blocks of `block_size` tokens each.

    Args:
        blocks: None where memory never runs out.
    """

    def __init__(self, blocks: int | None, block_size: int) -> None:
        self.limited = blocks is not None
        self.total = UNLIMITED if blocks is None else blocks
        self.free = self.total
        self.block_size = block_size

    @property
    def use(self) -> float:
        """Share of the blocks that is taken."""
        return (self.total - self.free) / self.total if self.limited else 0.0

    def needed(self, tokens: int) -> int:
        """Blocks for the KV of that many tokens."""
        return -(-tokens // self.block_size)

    def take(self, blocks: int) -> bool:
        """Take blocks; False, and nothing is taken, if there are not enough."""
        if blocks > self.free:
            return False
        self.free -= blocks
        return True

    def give_back(self, blocks: int) -> None:
        """Return blocks that were taken."""
        self.free += blocks
        assert self.free <= self.total, "more blocks returned than there are"
