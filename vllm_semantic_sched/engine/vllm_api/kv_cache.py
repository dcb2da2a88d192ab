"""vLLM's KV cache: blocks, connectors, copies."""

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.engine.vllm_api import capabilities
from vllm_semantic_sched.engine.vllm_api.scheduling import preempt


def kv_cache_groups(scheduler: Scheduler) -> int:
    """Groups of layers that have block tables of their own; at least 1."""
    return max(1, len(scheduler.kv_cache_config.kv_cache_groups))


def has_one_block_table(scheduler: Scheduler) -> bool:
    """Whether all layers share one block table and look at the whole context."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def total_kv_blocks(scheduler: Scheduler) -> int:
    """Blocks that requests can hold: all but vLLM's null block; 0 for a model without KV cache."""
    if not scheduler.kv_cache_config.kv_cache_groups:
        return 0
    return max(0, scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1)


def free_kv_blocks(scheduler: Scheduler) -> int:
    """Blocks that no request holds; O(1)."""
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def encoder_tokens(scheduler: Scheduler, request: Request) -> int:
    """Tokens of a request's encoder inputs, for each of which an encoder-decoder model (Whisper)
    has cross-attention KV; 0 for others."""
    if not scheduler.is_encoder_decoder:
        return 0
    return sum(map(request.get_num_encoder_embeds, range(len(request.mm_features))))


def blocks_needed(scheduler: Scheduler, request: Request) -> int:
    """Blocks for all tokens that a waiting request has so far, those of its encoder inputs
    included, less those in use that the prefix cache already holds for it."""
    manager = scheduler.kv_cache_manager
    tokens = min(request.num_tokens, scheduler.max_model_len)
    cached, hits = _prefix_hit(manager, request)
    return manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens,
        new_computed_blocks=cached.blocks,
        num_encoder_tokens=encoder_tokens(scheduler, request),
        total_computed_tokens=hits,
        num_local_computed_tokens=hits,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
        prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
    )


def cached_tokens(scheduler: Scheduler, request: Request) -> int:
    """Tokens of a waiting request that the prefix cache holds, from its beginning. O(log blocks)
    where all layers share one block table: who holds a block holds those before it, too, and gives
    them up later."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching or request.skip_reading_prefix_cache:
        return 0
    size = scheduler.block_size
    if not has_one_block_table(scheduler) or scheduler.hash_block_size != size:
        return _prefix_hit(manager, request)[1]
    hashes, find = request.block_hashes, manager.block_pool.get_cached_block
    places = range(min(len(hashes), (request.num_tokens - 1) // size))
    return size * bisect.bisect_left(places, True, key=lambda place: not find(hashes[place], [0]))


def _prefix_hit(manager: KVCacheManager, request: Request) -> tuple[KVCacheBlocks, int]:
    """The blocks that the prefix cache holds of a waiting request, and their tokens."""
    # vLLM reports the lookup to subscribers of KV events if the request asks for that.
    if manager.enable_kv_cache_events and request.kv_cache_report_mode == "full":
        return manager.empty_kv_cache_blocks, 0
    blocks, tokens, _ = manager.get_computed_blocks(request)
    return blocks, tokens


def blocks_held(scheduler: Scheduler, request: Request) -> int:
    """Blocks in a running request's block tables, shared ones included."""
    tables = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return sum(not block.is_null for block in itertools.chain(*tables))


def freeable_blocks(scheduler: Scheduler, request: Request) -> int | None:
    """Blocks that preempting a running request frees, now or when the steps in flight have ended
    (`deferred_blocks`): those that it does not share. None: it must not be preempted now."""
    in_flight = request.num_in_flight_tokens > 0
    if request.resumable and in_flight and not capabilities.HELD_ADAPTERS_COUNT:
        return None  # before 0.33, vLLM would lose a session whose turn ends in a step in flight
    tables = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return _unshared(itertools.chain(*tables))


def deferred_blocks(scheduler: Scheduler) -> int:
    """Blocks of preempted and finished requests that vLLM frees when the steps in flight, which may
    write to them, have ended."""
    return sum(_unshared(blocks) for _, blocks in scheduler.deferred_frees)


def _unshared(blocks: Iterable[KVCacheBlock]) -> int:
    return sum(block.ref_cnt == 1 and not block.is_null for block in blocks)


def frees_at_once(scheduler: Scheduler) -> bool:
    """Whether the blocks of a request that is preempted now are free at once; else they are among
    the `deferred_blocks`."""
    return not scheduler.defer_block_free or (
        scheduler.sched_step_seq <= scheduler.processed_step_seq
    )


def reserved_blocks(scheduler: Scheduler) -> int:
    """Blocks that vLLM sets aside for prefills under way before it loads KV beside steps."""
    if scheduler.connector is None:
        return 0
    drafts: Any = scheduler._spec_decode_step_blocks  # a method in 0.31
    drafts = drafts() if callable(drafts) else drafts
    return scheduler._inflight_prefill_reserved_blocks() + drafts


def most_blocks_of_a_step(scheduler: Scheduler) -> int:
    """Blocks that the coming step takes at most: one more a request than its tokens fill."""
    filled = -(-scheduler.max_num_scheduled_tokens // scheduler.block_size)
    blocks = filled + scheduler.max_num_running_reqs
    return blocks * kv_cache_groups(scheduler) + scheduler.kv_cache_manager.watermark_blocks


def keep_blocks(
    manager: KVCacheManager, request: Request, numbers: Collection[int]
) -> list[KVCacheBlock]:
    """Keep some blocks of a running request allocated when it is preempted, until `free_blocks`."""
    wanted = set(numbers)
    tables = manager.get_blocks(request.request_id).blocks
    blocks = [block for block in itertools.chain(*tables) if block.block_id in wanted]
    manager.block_pool.touch(blocks)
    return blocks


def free_blocks(manager: KVCacheManager, blocks: list[KVCacheBlock]) -> None:
    """Free what `keep_blocks` returned, the last first: the prefix cache gives those up first."""
    manager.block_pool.free_blocks(reversed(blocks))


def free_blocks_at_once(scheduler: Scheduler) -> None:
    """Free blocks without waiting for steps in flight, in spite of a KV connector. With vLLM's
    hook, the connector says so (`requires_deferred_block_free`)."""
    if not capabilities.HOOKS.on_preemption:
        scheduler.defer_block_free = False


class CacheOrder:
    """Lets the prefix cache give up last what some requests have left in it.

    vLLM takes free blocks from the front of a list, and puts cached ones back at its end. Those of
    the chosen requests stay at the end: blocks of others go in before them. Beyond `share` of all
    blocks, the oldest of them become blocks like others.

    Args:
        failed: told, in the except block, that something went wrong; vLLM's own order applies then.
    """

    def __init__(
        self, scheduler: Scheduler, share: Callable[[], float], failed: Callable[[], None]
    ) -> None:
        self._pool = scheduler.kv_cache_manager.block_pool
        self._share = share
        self._failed = failed
        self._kept: OrderedDict[int, KVCacheBlock] = OrderedDict()  # by id, oldest first
        self._free: Callable[[Request], None] | None = None  # vLLM's, once it is replaced
        self._append: Callable[[list[KVCacheBlock]], None] = self._pool.free_block_queue.append_n
        self._chosen: set[str] = set()  # ids of requests that end now
        self._freeing = False  # the blocks of one of them
        self._scheduler = scheduler

    def keep(self, request: Request) -> None:
        """Choose a request, which is about to give back its blocks."""
        if self._free is None:
            self._free = self._scheduler._free_request_blocks
            self._scheduler._free_request_blocks = self._free_blocks  # type: ignore[method-assign]
            self._pool.free_block_queue.append_n = self._insert  # type: ignore[method-assign]
        self._chosen.add(request.request_id)

    def clear(self) -> None:
        """The cache has been emptied."""
        self._kept.clear()

    def _free_blocks(self, request: Request) -> None:
        assert self._free is not None
        self._freeing = request.request_id in self._chosen
        self._chosen.discard(request.request_id)
        try:
            self._free(request)
        finally:
            self._freeing = False

    def _insert(self, blocks: list[KVCacheBlock]) -> None:
        """In place of vLLM's `append_n`."""
        first = None
        try:
            first = self._first_kept(blocks)
        except Exception:
            self._stop()
            self._failed()
        if first is None or first.prev_free_block is None or not blocks:
            self._append(blocks)
            return
        before = first.prev_free_block
        for block in blocks:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, first.prev_free_block = first, before
        self._pool.free_block_queue.num_free_blocks += len(blocks)

    def _first_kept(self, blocks: list[KVCacheBlock]) -> KVCacheBlock | None:
        """The kept block before which these blocks go; None: they go to the end of the list."""
        kept = self._kept
        for block in blocks:
            kept.pop(block.block_id, None)
        most = self._share() * self._pool.num_gpu_blocks
        if self._freeing:
            kept.update((block.block_id, block) for block in blocks)
            if len(kept) > most:
                for block in [block for block in kept.values() if _is_reused(block)]:
                    del kept[block.block_id]
        first = next(iter(kept.values()), None)
        while first is not None and (len(kept) > most or _is_reused(first)):
            del kept[first.block_id]
            first = next(iter(kept.values()), None)
        return None if self._freeing else first

    def _stop(self) -> None:
        """Put blocks back as vLLM does from now on."""
        self._kept.clear()
        self._pool.free_block_queue.append_n = self._append  # type: ignore[method-assign, assignment]


def _is_reused(block: KVCacheBlock) -> bool:
    """Whether a block that was free and cached no longer is."""
    return block.ref_cnt > 0 or block.block_hash is None


def prefix_cached_blocks(scheduler: Scheduler, request: Request, first: int) -> tuple[int, int]:
    """How many of the `first` blocks of a running request's only block table are in the prefix
    cache, without a gap from the start, and how many of these other requests hold as well."""
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return 0, 0
    blocks = manager.get_blocks(request.request_id).blocks[0][:first]
    cached = list(itertools.takewhile(lambda block: block.block_hash is not None, blocks))
    shared = list(itertools.takewhile(lambda block: block.ref_cnt > 1, cached))
    return len(cached), len(shared)


def tokens_with_kv(request: Request) -> int:
    """Tokens whose KV is on the device; vLLM counts tokens in flight as computed, too."""
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)


def recompute_unloaded(
    scheduler: Scheduler, blocks: Collection[int], unreported: Collection[str]
) -> bool:
    """Compute again what was not loaded into blocks. Running requests that hold one of them, or a
    block computed from one, lose their KV and the output of steps in flight. `unreported`: requests
    that wait for a load whose end no worker reports. Returns whether a request that may have held
    such a block was preempted in the meantime: what was saved of it may be wrong."""
    manager = scheduler.kv_cache_manager
    null = manager.block_pool.null_block.block_id
    tables = {request: manager.get_block_ids(request.request_id) for request in scheduler.running}
    spoiled = set(blocks)
    known = -1
    while known < len(spoiled):  # other requests may share the blocks
        known = len(spoiled)
        for table in itertools.chain(*tables.values()):
            after = itertools.dropwhile(lambda block: block not in spoiled, table)
            spoiled.update(block for block in after if block != null)
    preempted_since = False
    for request in scheduler.requests.values():
        name = request.request_id
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if any(not spoiled.isdisjoint(table) for table in manager.get_block_ids(name)):
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(name)
                if name in unreported:
                    scheduler.finished_recving_kv_req_ids.add(name)
        elif request.num_stale_output_tokens and not request.drop_stale_output:
            request.drop_stale_output = True
            preempted_since = True
    if preempted_since:
        # What such a request has left in the prefix cache cannot be told from the rest.
        manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
    else:
        manager.evict_blocks(set(spoiled))
    for request, groups in tables.items():
        if any(not spoiled.isdisjoint(table) for table in groups):
            preempt(scheduler, request, drop_output=True)
    return preempted_since


class KVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's base class of connectors that know several block tables per request."""

    @property
    def step_metadata(self) -> KVConnectorMetadata:
        """What the scheduler's side sent for this step; only on a worker."""
        return self._get_connector_metadata()


def all_kv_connectors(scheduler: Scheduler) -> list[Any]:
    """The scheduler's KV connector and, if it combines several, its members."""
    connector = scheduler.connector
    return [] if connector is None else [connector, *getattr(connector, "sub_connectors", ())]


def block_copy_and_pin() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's `swap_blocks_batch(sources, targets, sizes)`, of int64 tensors of addresses and bytes,
    and what pins a host tensor in place: torch's own pinned allocations take up to twice the
    memory, because they are rounded up to powers of two."""
    from vllm import _custom_ops  # needs the compiled extension of a GPU build
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    return _custom_ops.swap_blocks_batch, pin_tensor


def most_kv_tokens(scheduler: Scheduler, encoded: int = 0) -> int:
    """Tokens whose KV fits beside that of `encoded` ones (`encoder_tokens`) if one request holds
    all blocks, at most `max_model_len`."""
    manager = scheduler.kv_cache_manager
    blocks = total_kv_blocks(scheduler)

    def too_large(tokens: int) -> bool:
        needed = manager.coordinator.get_num_blocks_to_allocate(
            request_id="",
            num_tokens=tokens,
            new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=encoded,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=tokens,
        )
        return needed > blocks

    ahead = scheduler.num_lookahead_tokens  # of drafts
    lengths = range(scheduler.max_model_len + ahead + 1)
    first_too_large = bisect.bisect_left(lengths, True, key=too_large)
    return max(0, first_too_large - 1 - ahead)
