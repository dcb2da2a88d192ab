"""The pool of KV blocks, and the prefix cache."""

from collections import Counter, OrderedDict

from vllm_semantic_sched.sim.request import Run


class BlockPool:
    """KV blocks of `block_size` tokens each; `blocks` None: unlimited."""

    def __init__(self, blocks: int | None, block_size: int) -> None:
        self.limited = blocks is not None
        self.total = 1 << 60 if blocks is None else blocks
        self.free = self.total
        self.block_size = block_size

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
        """Free blocks that `allocate` took. AssertionError if more come back than were taken."""
        self.free += blocks
        assert self.free <= self.total, "more blocks returned than there are"


class PrefixCache:
    """Whole blocks that requests with the same beginning share, by the hash of all tokens so far.

    A shared block is taken from the pool once. An unused one stays until its room is needed; the
    oldest goes first. vLLM also evicts such blocks while blocks without a hash are free, if those
    were freed later.
    """

    def __init__(self, pool: BlockPool, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled  # off: nothing enters
        self._users: Counter[int] = Counter()
        self._unused: OrderedDict[int, None] = OrderedDict()

    def hits(self, run: Run) -> tuple[int, int]:
        """First blocks of a waiting request that are cached, and how many of these are in use. The
        block of its last token is computed in any case."""
        while len(self._unused) > self._pool.free:
            self._unused.popitem(last=False)
        last_hit = (run.job.tokens - 1) // self._pool.block_size
        cached = used = 0
        for block in run.request.blocks[:last_hit]:
            if block in self._users:
                used += 1
            elif block not in self._unused:
                break
            cached += 1
        return cached, used

    def enter(self, run: Run, tokens: int) -> None:
        """The first `tokens` of a request with a seat have KV, or get it in this step. Blocks that
        another request computed at the same time stay its own."""
        blocks = run.request.blocks if self._enabled else ()
        for place in range(run.cached, min(tokens // self._pool.block_size, len(blocks))):
            block = blocks[place]
            if block in self._users and place >= run.shared:
                break
            self._unused.pop(block, None)
            self._users[block] += 1
            run.cached = place + 1

    def shared(self, run: Run) -> int:
        """How many of the blocks of a request with a seat others use as well."""
        return sum(self._users[block] > 1 for block in run.request.blocks[: run.cached])

    def leave(self, run: Run) -> int:
        """A request gives back its seat; how many of its blocks others still use."""
        kept = 0
        for block in reversed(run.request.blocks[: run.cached]):
            self._users[block] -= 1
            if self._users[block]:
                kept += 1
            else:
                del self._users[block]
                self._unused[block] = None
        run.cached = run.shared = 0
        return kept
