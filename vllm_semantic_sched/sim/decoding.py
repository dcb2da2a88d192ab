"""Decoding sequences, advanced all at once."""

from __future__ import annotations

from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.request import Run


class Decoding:
    """Sequences that get one token a step.

    A tick counts the steps. What a sequence has generated follows from the tick, and so do the KV
    blocks that it holds: it needs another one every `block_size` ticks, so sequences are grouped
    by the tick, modulo that, at which they do. A step costs as much as changes in it and not as
    much as the batch is large.

    Args:
        find_longest: whether anybody wants to know the longest.

    Attributes:
        tick: steps so far.
    """

    def __init__(self, pool: BlockPool, find_longest: bool) -> None:
        self.tick = 0
        self._pool = pool
        self._count = 0
        self._tokens = 0  # of all sequences at tick 0
        self._longest: AddressableHeap[Run] | None = AddressableHeap() if find_longest else None
        self._ends: AddressableHeap[Run] = AddressableHeap()
        # Empty where blocks never run out: none are counted then.
        phases = pool.block_size if pool.limited else 0
        self._phases: list[dict[Run, None]] = [{} for _ in range(phases)]
        self._grown = -1  # the last tick for which sequences have got their blocks

    def __len__(self) -> int:
        return self._count

    def __contains__(self, run: object) -> bool:
        return run in self._ends

    @property
    def context(self) -> int:
        """Tokens of all sequences together."""
        return self._tokens + self._count * self.tick

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence, 0 if there is none or nobody wants to know."""
        if self._longest is None or (run := self._longest.peek()) is None:
            return 0
        return self.tick - int(self._longest.key(run))

    def add(self, run: Run) -> None:
        """A sequence whose prefill is complete; `job.generated` is up to date, and its blocks are
        those of the tokens that it had before the newest."""
        run.offset = run.job.generated - self.tick
        tokens = run.job.prompt_tokens + run.offset
        self._count += 1
        self._tokens += tokens
        if self._longest is not None:
            self._longest.push(run, -tokens)
        self._ends.push(run, run.request.output_tokens - run.offset)
        if self._phases:
            self._phases[self._phase(run)][run] = None

    def observe(self, run: Run) -> None:
        """Bring `generated` and `computed` of a decoding sequence's job up to date."""
        if run.offset is not None:
            run.job.generated = run.offset + self.tick
            run.job.computed = run.job.tokens - 1  # the newest token has no KV yet

    def discard(self, run: Run) -> None:
        """A sequence stops decoding, if it does; its job stays as `observe` left it."""
        if self._ends.discard(run):
            self._stop(run)

    def _stop(self, run: Run) -> None:
        assert run.offset is not None
        self._count -= 1
        self._tokens -= run.job.prompt_tokens + run.offset
        if self._longest is not None:
            self._longest.discard(run)
        run.blocks = self.blocks(run)
        if self._phases:
            del self._phases[self._phase(run)][run]
        run.offset = None

    # KV blocks

    def blocks(self, run: Run) -> int:
        """KV blocks that a sequence holds, decoding or not."""
        if run.offset is None or not self._phases:
            return run.blocks
        return self._pool.needed(run.job.prompt_tokens + run.offset + self._grown)

    def outgrowing(self) -> list[Run]:
        """Sequences that need one more block for the coming step."""
        return list(self._phases[self.tick % len(self._phases)]) if self._phases else []

    def growth(self, steps: int) -> int:
        """Blocks that the sequences need for so many coming steps."""
        phases = self._phases
        if not phases:
            return 0
        rounds, rest = divmod(steps, len(phases))
        blocks = rounds * self._count
        for place in range(self.tick, self.tick + rest):
            blocks += len(phases[place % len(phases)])
        return blocks

    def grow(self) -> None:
        """All sequences have got the blocks that they need for the coming step."""
        self._grown = self.tick

    def _phase(self, run: Run) -> int:
        # It needs a block when its tokens are one more than blocks hold.
        assert run.offset is not None
        return (1 - run.job.prompt_tokens - run.offset) % self._pool.block_size

    # Steps

    @property
    def uneventful_steps(self) -> int:
        """Coming steps in which no sequence ends."""
        first = self._ends.peek()
        return 0 if first is None else self._ends.key(first) - self.tick - 1

    def skip(self, steps: int) -> None:
        """So many steps have passed, `uneventful_steps` at most, and sequences have grown."""
        self.tick += steps
        self._grown = self.tick - 1

    def advance(self) -> list[Run]:
        """One step has passed; the sequences that are complete by it, which stop decoding."""
        self.tick += 1
        ended = list(self._ends.pop_until(self.tick, len(self)))
        for run in ended:
            self.observe(run)
            self._stop(run)
        return ended
