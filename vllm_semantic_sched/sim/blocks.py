"""The pool of KV blocks, and the prefix cache."""

from __future__ import annotations

import bisect
from collections import OrderedDict

from vllm_semantic_sched.sim.request import CachedBlock, Run


class BlockPool:
    """KV blocks of `block_size` tokens each; `blocks` None: unlimited.

    Free blocks that the prefix cache knows are reused last, and those that became free first go
    first (vLLM's `FreeKVCacheBlockQueue`, into which blocks without a hash return at the front).
    """

    def __init__(self, blocks: int | None, block_size: int) -> None:
        self.limited = blocks is not None
        self.total = 1 << 60 if blocks is None else blocks
        self.free = self.total
        self.block_size = block_size
        # Requests that compute the same block at the same time make copies of it, oldest first.
        self.cached: dict[int, dict[CachedBlock, None]] = {}
        self.unused: OrderedDict[CachedBlock, None] = OrderedDict()  # cached and free

    def needed(self, tokens: int) -> int:
        """Blocks for the KV of this many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, blocks: int) -> bool:
        """Allocate blocks; False, without any, if there are not enough."""
        if blocks > self.free:
            return False
        self.free -= blocks
        while len(self.unused) > self.free:
            self._evict(self.unused.popitem(last=False)[0])
        return True

    def give_back(self, blocks: int) -> None:
        """Free blocks that `allocate` took. AssertionError if more come back than were taken."""
        self.free += blocks
        assert self.free <= self.total, "more blocks returned than there are"

    def _evict(self, block: CachedBlock) -> None:
        copies = self.cached[block.hash]
        del copies[block]
        if not copies:
            del self.cached[block.hash]


class PrefixCache:
    """Whole blocks that requests with the same beginning share, as vLLM's prefix cache does it."""

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled  # off: nothing enters

    def hits(self, run: Run) -> tuple[int, int]:
        """First blocks of a waiting request that are cached, and how many of these are in use. The
        block of its last token is computed in any case."""
        found = self._find(run)
        return len(found), sum(block.users > 0 for block in found)

    def cached_blocks(self, run: Run) -> int:
        """The first of the two, in O(log blocks): who holds a block holds those before it, too, and
        gives them up later."""
        cached, hashes = self._pool.cached, run.request.blocks
        if not cached or not hashes:
            return 0
        places = range(min(len(hashes), (run.job.tokens - 1) // self._pool.block_size))
        return bisect.bisect_left(places, True, key=lambda place: hashes[place] not in cached)

    def _find(self, run: Run) -> list[CachedBlock]:
        cached, found = self._pool.cached, []
        if not cached:
            return []
        last_hit = (run.job.tokens - 1) // self._pool.block_size
        for block_hash in run.request.blocks[:last_hit]:
            copies = cached.get(block_hash)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def share(self, run: Run) -> None:
        """Let a request that gets a seat hold the blocks that are cached for it; those that nobody
        used are not free from now on, which the caller counts."""
        run.cached = self._find(run)
        for block in run.cached:
            block.users += 1
            self._pool.unused.pop(block, None)

    def enter(self, run: Run, tokens: int) -> None:
        """The first `tokens` of a request with a seat have KV, or get it in this step."""
        hashes = run.request.blocks if self._enabled else ()
        full = min(tokens // self._pool.block_size, len(hashes))
        for block_hash in hashes[len(run.cached) : full]:
            block = CachedBlock(block_hash, users=1)
            run.cached.append(block)
            self._pool.cached.setdefault(block_hash, {})[block] = None

    def shared(self, run: Run) -> int:
        """How many of the blocks of a request with a seat others use as well."""
        return sum(block.users > 1 for block in run.cached)

    def leave(self, run: Run) -> int:
        """A request gives back its seat; how many of its blocks others still use. Its last blocks
        become free first: a shorter beginning is of more use."""
        kept = 0
        for block in reversed(run.cached):
            block.users -= 1
            if block.users:
                kept += 1
            else:
                self._pool.unused[block] = None
        run.cached = []
        return kept
