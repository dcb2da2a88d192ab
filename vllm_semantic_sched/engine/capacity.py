"""Seats and KV blocks: what is free, needed and held, by vLLM's own accounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.policy.facts.capacity import EngineCapacity

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class Capacity:
    """Answers questions about seats and KV blocks without changing anything."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager

    def total(self) -> EngineCapacity:
        """Seats and KV blocks in all, as reservations count them."""
        scheduler = self._scheduler
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        return EngineCapacity(
            seats=scheduler.max_num_running_reqs,
            # vLLM keeps one block as null block; each group of layers has blocks of its own.
            blocks=(self._manager.block_pool.num_gpu_blocks - 1) // max(1, groups),
            block_size=scheduler.block_size,
        )

    def free_for_admission(self) -> int:
        """Blocks that waiting requests may take in the coming step: free ones, less vLLM's
        watermark, less one for each running request that is about to begin a block."""
        block_size = self._scheduler.block_size
        starting = sum(
            request.num_computed_tokens % block_size == 0 for request in self._scheduler.running
        )
        free: int = self._manager.block_pool.get_num_free_blocks()
        return free - self._manager.watermark_blocks - starting

    def tokens_held(self) -> int:
        """About how many tokens running requests have KV of: whole blocks, O(1)."""
        pool = self._manager.block_pool
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        groups = max(1, len(self._manager.kv_cache_config.kv_cache_groups))
        tokens: int = used * self._scheduler.block_size // groups
        return tokens

    def needed(self, request: Request) -> int:
        """Blocks for all tokens that a waiting request has so far, less what the prefix cache
        holds for it in blocks that are in use anyway."""
        manager = self._manager
        tokens = min(request.num_tokens, self._scheduler.max_model_len)
        # A lookup is reported to subscribers of KV events; do without it then.
        if manager.enable_kv_cache_events:
            cached, hits = manager.empty_kv_cache_blocks, 0
        else:
            cached, hits, _ = manager.get_computed_blocks(request)
        needed: int = manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=cached.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=hits,
            num_local_computed_tokens=hits,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return needed

    def freed_by(self, request: Request) -> int:
        """Blocks that come free when a running request is preempted: those it does not share."""
        groups = self._manager.get_blocks(request.request_id).blocks
        return sum(
            1 for group in groups for block in group if block.ref_cnt == 1 and not block.is_null
        )

    def free_seats(self) -> int:
        """Running-request slots that waiting requests may take in the coming step."""
        scheduler = self._scheduler
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        # Requests that hold blocks while they wait are seated before all others.
        return scheduler.max_num_active_reqs - taken - len(scheduler.kv_holding_waiting)

    def admissible(self, request: Request) -> bool:
        """Whether a waiting request has a seat and its blocks without preempting anybody."""
        return (
            self.free_seats() > 0
            and self.is_ready(request)
            and self.needed(request) <= self.free_for_admission()
        )

    def is_ready(self, request: Request) -> bool:
        """Whether vLLM could admit a waiting request now if there were room."""
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            structured = request.structured_output_request
            return structured is not None and structured.grammar is not None
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        return self._adapter_has_a_slot(request)

    def _adapter_has_a_slot(self, request: Request) -> bool:
        lora_config = self._scheduler.lora_config
        if not lora_config or not request.lora_request:
            return True
        active = {
            running.lora_request.lora_int_id
            for running in self._scheduler.running
            if running.lora_request
        }
        return request.lora_request.lora_int_id in active or len(active) < lora_config.max_loras
