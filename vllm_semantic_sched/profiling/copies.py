"""Times copies of KV blocks between an engine worker's cache and host memory, by the backends
that preemption uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

# Between preempting a request and resuming it the engine computes a lot: neither side of a copy is
# in a processor's cache then. Written before each copy, this empties them.
_FLUSH_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Copies:
    """Seconds of each repeat: one row per size, one column per repeat."""

    bytes_per_block: int
    save: list[list[float]]
    load: list[list[float]]


def time_copies(worker: Any, blocks: list[int], repeats: int, seed: int) -> Copies:
    """Save random blocks to host memory and load them into the same blocks again, so that an
    idle engine's cache is afterwards as it was. Runs in the engine's worker.

    Args:
        blocks: how many at a time, for each size.
    """
    import torch

    from vllm_semantic_sched.engine.kv.block_copy import block_regions, make_backend

    runner = worker.model_runner
    regions = block_regions(runner.kv_caches, runner.kv_cache_config.num_blocks)
    backend = make_backend(regions, slots=max(blocks))
    device = regions[0].device
    flush = torch.zeros(_FLUSH_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
    generator = torch.Generator().manual_seed(seed)

    def timed(copy: Callable[[], None]) -> float:
        if flush is not None:
            flush.add_(1)
        _settle(device)
        start = time.perf_counter()
        copy()
        _settle(device)
        return time.perf_counter() - start

    save: list[list[float]] = [[] for _ in blocks]
    load: list[list[float]] = [[] for _ in blocks]
    # One copy more than counted: the first touches host memory that is not there yet.
    for repeat in range(repeats + 1):
        for place, count in enumerate(blocks):
            order = torch.randperm(regions[0].shape[0] - 1, generator=generator)
            rows, slots = (order[:count] + 1).tolist(), [range(count)]
            saved = timed(partial(backend.save, rows, slots))
            loaded = timed(partial(backend.load, rows, slots))
            if repeat:
                save[place].append(saved)
                load[place].append(loaded)
    return Copies(sum(region.shape[1] for region in regions), save, load)


def _settle(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
