"""Seats and KV blocks: what is free, needed and held, by vLLM's own accounts."""

from __future__ import annotations

from vllm_semantic_sched.engine.vllm_api import (
    Request,
    Scheduler,
    blocks_needed,
    free_kv_blocks,
    free_seats,
    is_ready,
    kv_cache_groups,
    total_kv_blocks,
    total_seats,
    watermark_blocks,
)
from vllm_semantic_sched.policy.order.reservation import EngineCapacity


class Capacity:
    """Answers questions about seats and KV blocks without changing anything."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def total(self) -> EngineCapacity:
        """All seats and KV blocks, as reservations count them."""
        scheduler = self._scheduler
        return EngineCapacity(
            seats=total_seats(scheduler),
            # Each group of layers has blocks of its own.
            blocks=total_kv_blocks(scheduler) // kv_cache_groups(scheduler),
            block_size=scheduler.block_size,
        )

    def free_for_admission(self) -> int:
        """Blocks that waiting requests can take in the coming step: free ones, less vLLM's
        watermark, less one for each running request that is about to begin a block."""
        scheduler, block_size = self._scheduler, self._scheduler.block_size
        starting = sum(
            request.num_computed_tokens % block_size == 0 for request in scheduler.running
        )
        return free_kv_blocks(scheduler) - watermark_blocks(scheduler) - starting

    def tokens_held(self) -> int:
        """Approximate tokens whose KV running requests hold, in whole blocks; O(1)."""
        scheduler = self._scheduler
        used = total_kv_blocks(scheduler) - free_kv_blocks(scheduler)
        tokens: int = used * scheduler.block_size // kv_cache_groups(scheduler)
        return tokens

    def needed(self, request: Request) -> int:
        """Blocks that a waiting request needs to be admitted."""
        return blocks_needed(self._scheduler, request)

    def free_seats(self) -> int:
        """Seats that waiting requests can take in the coming step."""
        return free_seats(self._scheduler)

    def admissible(self, request: Request) -> bool:
        """Whether a waiting request has a seat and its blocks without a preemption."""
        return (
            self.free_seats() > 0
            and is_ready(self._scheduler, request)
            and self.needed(request) <= self.free_for_admission()
        )
