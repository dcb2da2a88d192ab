"""Times copies of KV blocks between an engine worker's cache and host memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
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

    caches = _distinct(worker.model_runner.kv_caches)
    device = caches[0].device
    on_host = device.type == "cpu"
    generator = torch.Generator().manual_seed(seed)
    pools = [
        torch.empty((max(blocks), *cache.shape[1:]), dtype=cache.dtype, pin_memory=not on_host)
        for cache in caches
    ]
    for pool in pools:
        pool.zero_()
    flush = torch.zeros(_FLUSH_BYTES, dtype=torch.uint8) if on_host else None

    def timed(copy: Any) -> float:
        if flush is not None:
            flush.add_(1)
        _settle(device)
        start = time.perf_counter()
        copy()
        _settle(device)
        return time.perf_counter() - start

    save: list[list[float]] = [[] for _ in blocks]
    load: list[list[float]] = [[] for _ in blocks]
    for _ in range(repeats):
        for place, count in enumerate(blocks):
            rows = torch.randperm(caches[0].shape[0] - 1, generator=generator)[:count] + 1
            rows = rows.to(device)
            parts = [(cache, pool[:count]) for cache, pool in zip(caches, pools, strict=True)]
            save[place].append(timed(lambda parts=parts, rows=rows: _save(parts, rows)))
            load[place].append(timed(lambda parts=parts, rows=rows: _load(parts, rows)))
    size = sum(cache[0].numel() * cache.element_size() for cache in caches)
    return Copies(size, save, load)


def _save(parts: list[tuple[Any, Any]], rows: Any) -> None:
    import torch

    for cache, pool in parts:
        if pool.device == cache.device:
            torch.index_select(cache, 0, rows, out=pool)
        else:
            pool.copy_(cache[rows], non_blocking=True)


def _load(parts: list[tuple[Any, Any]], rows: Any) -> None:
    for cache, pool in parts:
        cache.index_copy_(0, rows, pool.to(cache.device, non_blocking=True))


def _settle(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _distinct(caches: list[Any]) -> list[Any]:
    """One tensor per storage: layers can share theirs."""
    return list({cache.data_ptr(): cache for cache in caches}.values())
