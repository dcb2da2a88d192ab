"""The decoding sequences, advanced together."""

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.request import Run


class Decoding(AddressableHeap[Run]):
    """Sequences that get one token per step, by the tick in which they end.

    The tick counts the steps; a sequence's tokens and KV blocks follow from it. A sequence needs
    another block every `block_size` ticks, so sequences are grouped by that tick modulo
    `block_size`. The work of a step depends on the changes in it, not on the size of the batch.
    `find_longest`: whether `longest_context` is used.
    """

    def __init__(self, pool: BlockPool, find_longest: bool) -> None:
        super().__init__()
        self.tick = 0
        # Held sequences, which count in nothing else: blocks that each needs for its next token.
        self.held: dict[Run, int] = {}
        self.held_growth = 0  # of all together
        self._pool = pool
        self._tokens = 0  # of all sequences at tick 0
        self._longest: AddressableHeap[Run] | None = AddressableHeap() if find_longest else None
        # Empty if blocks are unlimited, because none are counted then.
        phases = pool.block_size if pool.limited else 0
        self._phases: list[dict[Run, None]] = [{} for _ in range(phases)]
        self._grown = -1  # the last tick for which sequences have got their blocks

    @property
    def context(self) -> int:
        """Total tokens of all sequences."""
        return self._tokens + len(self) * self.tick

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence; 0 if there is none or `find_longest` is off."""
        first = self._longest.first() if self._longest is not None else None
        return 0 if first is None else self.tick - int(first[0])

    def add(self, run: Run) -> None:
        """Add a sequence with a complete prefill; `job.generated` is up to date, and its blocks
        cover all tokens but the newest."""
        run.offset = run.job.generated - self.tick
        tokens = run.job.prompt_tokens + run.offset
        self._tokens += tokens
        if self._longest is not None:
            self._longest.push(run, -tokens)
        self.push(run, run.request.output_tokens - run.offset)
        if self._phases:
            self._phases[self._phase(run)][run] = None

    def observe(self, run: Run) -> None:
        """Update `generated` and `computed` of a decoding sequence's job."""
        if run.offset is not None:
            run.job.generated = run.offset + self.tick
            run.job.computed = run.job.tokens - 1  # the newest token has no KV yet

    def discard(self, run: Run) -> bool:
        """Remove a sequence, held or not; False if it does not decode. Its job stays as `observe`
        left it."""
        if run in self.held:  # with the blocks that it has
            self.held_growth -= self.held.pop(run)
        decodes = super().discard(run)
        if decodes:
            self._stop(run)
        return decodes

    def _stop(self, run: Run) -> None:
        assert run.offset is not None
        self._tokens -= run.job.prompt_tokens + run.offset
        if self._longest is not None:
            self._longest.discard(run)
        run.blocks = self.blocks(run)
        if self._phases:
            del self._phases[self._phase(run)][run]
        run.offset = None

    def hold(self, run: Run) -> None:
        """Hold a sequence, which keeps its blocks; no-op if it does not decode."""
        self.observe(run)
        if self.discard(run):
            needed = self._pool.needed(run.job.tokens) if self._phases else run.blocks
            self.held[run] = needed - run.blocks
            self.held_growth += self.held[run]

    def release(self, run: Run) -> None:
        """Let a sequence advance again; no-op if it is not held."""
        if run in self.held:
            self.held_growth -= self.held.pop(run)
            self.add(run)

    # KV blocks

    def blocks(self, run: Run) -> int:
        """KV blocks that a sequence holds, decoding or not."""
        if run.offset is None or not self._phases:
            return run.blocks
        return self._pool.needed(run.job.prompt_tokens + run.offset + self._grown)

    def next_blocks(self, run: Run) -> int:
        """Blocks that a sequence needs for its next token, decoding or held."""
        if run in self.held:
            return self.held[run]
        if run.offset is None or not self._phases:
            return 0
        return int(run in self._phases[self.tick % len(self._phases)])

    def outgrowing(self) -> list[Run]:
        """Sequences that need one more block for the coming step."""
        return list(self._phases[self.tick % len(self._phases)]) if self._phases else []

    def growth(self, steps: int) -> int:
        """Blocks that the sequences need for this many coming steps."""
        phases = self._phases
        if not phases:
            return 0
        rounds, rest = divmod(steps, len(phases))
        blocks = rounds * len(self)
        for place in range(self.tick, self.tick + rest):
            blocks += len(phases[place % len(phases)])
        return blocks

    def grow(self) -> None:
        """Record that all sequences have their blocks for the coming step."""
        self._grown = self.tick

    def _phase(self, run: Run) -> int:
        # It needs a block when it has one token more than its blocks hold.
        assert run.offset is not None
        return (1 - run.job.prompt_tokens - run.offset) % self._pool.block_size

    # Steps

    @property
    def uneventful_steps(self) -> int:
        """Number of coming steps in which no sequence ends."""
        first = self.first()
        return 0 if first is None else first[0] - self.tick - 1

    def skip(self, steps: int) -> None:
        """Advance by at most `uneventful_steps` steps, with their blocks."""
        self.tick += steps
        self._grown = self.tick - 1

    def advance(self) -> list[Run]:
        """Advance by one step; removes and returns the sequences that it completes."""
        self.tick += 1
        ended = list(self.pop_until(self.tick, len(self)))
        for run in ended:
            self.observe(run)
            self._stop(run)
        return ended
