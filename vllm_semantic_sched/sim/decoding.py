"""Decoding sequences, advanced all at once."""

from __future__ import annotations

from vllm_semantic_sched.policy.order.heap import AddressableHeap
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.request import Run


class Decoding:
    """Sequences that get one token a step.

    A tick counts the steps. What a sequence has generated follows from the tick, and a calendar
    says which ones end or need a KV block at which tick, so a step costs as much as changes in
    it and not as much as the batch is large.

    Attributes:
        tick: steps so far.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.tick = 0
        self._pool = pool
        self._tokens = 0  # of all sequences at tick 0
        self._longest: AddressableHeap[Run] = AddressableHeap()
        self._ends: dict[int, list[Run]] = {}
        self._block_needs: dict[int, list[Run]] = {}

    def __len__(self) -> int:
        return len(self._longest)

    def __contains__(self, run: object) -> bool:
        return run in self._longest

    @property
    def context(self) -> int:
        """Tokens of all sequences together."""
        return self._tokens + len(self) * self.tick

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence, 0 if there is none."""
        run = self._longest.peek()
        return 0 if run is None else -self._longest.key(run) + self.tick

    def add(self, run: Run) -> None:
        """A sequence whose prefill is complete; `job.generated` is up to date."""
        run.offset = run.job.generated - self.tick
        run.finish_tick = run.request.output_tokens - run.offset
        self._tokens += run.job.prompt_tokens + run.offset
        self._longest.push(run, -(run.job.prompt_tokens + run.offset))
        self._ends.setdefault(run.finish_tick, []).append(run)
        self.note_blocks(run)

    def note_blocks(self, run: Run) -> None:
        """Put down when a sequence outgrows the blocks that it holds."""
        if self._pool.limited and run.offset is not None:
            held = run.blocks * self._pool.block_size
            run.block_tick = held - run.job.prompt_tokens - run.offset + 1
            self._block_needs.setdefault(run.block_tick, []).append(run)

    def observe(self, run: Run) -> None:
        """Bring `generated` and `computed` of a decoding sequence's job up to date."""
        if run.offset is not None:
            run.job.generated = run.offset + self.tick
            run.job.computed = run.job.tokens - 1  # the newest token has no KV yet

    def discard(self, run: Run) -> None:
        """A sequence stops decoding, if it does; its job stays as `observe` left it."""
        if run in self._longest:
            self._tokens += self._longest.key(run)
            self._longest.discard(run)
            run.offset = None

    def outgrowing(self) -> list[Run]:
        """Sequences that need one more block for the coming step."""
        due = self._block_needs.get(self.tick)
        if due is None:
            return []
        # A sequence that was preempted meanwhile has left its entries behind.
        return [run for run in dict.fromkeys(due) if run in self and run.block_tick == self.tick]

    @property
    def uneventful_steps(self) -> int:
        """Coming steps in which no sequence ends or needs a block."""
        steps = min(self._ends, default=self.tick + 1) - self.tick - 1
        if self._block_needs:
            steps = min(steps, min(self._block_needs) - self.tick)
        return max(0, steps)

    def skip(self, steps: int) -> None:
        """So many steps have passed, `uneventful_steps` at most."""
        self.tick += steps

    def advance(self) -> list[Run]:
        """One step has passed; the sequences that are complete by it, which stop decoding."""
        self._block_needs.pop(self.tick, None)
        self.tick += 1
        due = self._ends.pop(self.tick, None)
        if due is None:
            return []
        ended = [run for run in dict.fromkeys(due) if run in self and run.finish_tick == self.tick]
        for run in ended:
            self.observe(run)
            self.discard(run)
        return ended
