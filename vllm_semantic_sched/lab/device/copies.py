"""The copies of our swap connector, on the emulated device's copy queue."""

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from vllm_semantic_sched.engine.kv.block_copy import Blocks, CopyBackend, HasEnded, Slots

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.device.runner import Runner


class EmulatedCopies(CopyBackend):
    """Copies take the profile's time on a queue of their own, and move what the blocks stand
    for."""

    def __init__(self, runner: "Runner") -> None:
        super().__init__()
        self._runner = runner
        groups = runner.sanitizer.groups
        # A token has a place in a block of each group.
        self._tokens_per_block = groups[0].block_size / len(groups)

    def _copy(self, what: str, device: Blocks, host: Slots, beside: bool = False) -> HasEnded:
        runner = self._runner
        clock = runner.clock
        tokens = round(len(device) * self._tokens_per_block)
        price = runner.profile.save if what == "save" else runner.profile.load
        seconds = price(tokens)
        self._seconds[what] += seconds
        begin, end = runner.timeline.copy(clock.now(), seconds, beside)
        move: Callable[..., None] = runner.sanitizer.copy_in
        if what == "save":
            move = runner.sanitizer.copy_out
        name = f"a {what} of step {runner.number}"
        for block, slot in zip(device, chain.from_iterable(host), strict=True):
            move(block, slot, begin, end, name, beside)
        return lambda: clock.now() >= end

    def drain(self) -> tuple[set[str], set[int]]:
        """Wait for all copies first; see `CopyBackend`."""
        self._runner.clock.wait_until(self._runner.timeline.copies_end)
        return super().drain()
