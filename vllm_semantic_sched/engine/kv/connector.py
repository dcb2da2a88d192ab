"""vLLM's connector interface to KV swap. `policy.retention` decides what to save,
`engine.kv.ledger` keeps the accounts, `engine.kv.block_copy` copies."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import guarded, logger
from vllm_semantic_sched.engine.kv.block_copy import (
    CopyBackend,
    block_regions,
    make_backend,
    why_wrong,
)
from vllm_semantic_sched.engine.kv.ledger import (
    HostPool,
    KeptBlocks,
    Orders,
    SwapLedger,
    Transfer,
)
from vllm_semantic_sched.engine.kv.recovery import (
    FailedCopies,
    FailedProof,
    SwapMetadata,
    SwapReport,
    take,
)
from vllm_semantic_sched.engine.startup.settings import SwapConfig
from vllm_semantic_sched.engine.vllm_api import KVConnectorMetadata, KVConnectorOutput, Request
from vllm_semantic_sched.policy.config.section import parse_section


def host_slots(config: vllm_api.KVCacheConfig, host_gib: float) -> int:
    """Blocks that fit into the host pool. A block is a row of every region of memory; the groups of
    layers share the regions."""
    row_bytes: dict[int, int] = {}
    for tensor in config.kv_cache_tensors:
        layer_by_layer = tensor.layer_stride >= tensor.block_stride * config.num_blocks
        size = tensor.block_stride * (len(tensor.layers) if layer_by_layer else 1)
        row_bytes[tensor.offset] = max(size, row_bytes.get(tensor.offset, 0))
    if not config.kv_cache_groups:
        return 0
    return int(host_gib * 2**30) // max(1, sum(row_bytes.values()))


def why_config_unsupported(vllm_config: vllm_api.VllmConfig) -> str | None:
    """The part of `why_unsupported` that is known before the model is loaded."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    return None


def why_unsupported(vllm_config: vllm_api.VllmConfig, config: vllm_api.KVCacheConfig) -> str | None:
    """The reason why this engine's KV cannot be swapped; None if it can."""
    reason = why_config_unsupported(vllm_config)
    if reason is not None:
        return reason
    if config.needs_kv_cache_zeroing:
        return "the model's KV blocks are zeroed before use (Mamba layers, mixed precision)"
    groups = config.kv_cache_groups
    for group in groups:
        for spec in vllm_api.iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, vllm_api.AttentionSpec):
                return "not all of the model's state is attention KV"
    on_host = any(group.host_resident for group in groups)
    if on_host or len(config.transfer_group_ids) != len(groups):
        return "part of the model's KV lives outside the device's block pool"
    return None


class SemanticSwapConnector(vllm_api.KVConnector):
    """Copies victims' KV to host memory and back. Users name it in `--kv-transfer-config`, because
    the workers build their own instances, which hold the memory. The scheduler's instance keeps the
    ledger. A copy lives from a preemption until the request is admitted again, ends, or the cache
    is reset.

    An exception in a method that vLLM calls would end the server. Above each such method stands
    what replaces it then; of a step, what is left in its orders was not carried out.

    Attributes:
        unsupported: why KV cannot be swapped here; None if it can.
        ledger: host copies by request; on the scheduler's side.
        failed: copies that were not made, until what they would have brought is computed again.

    Raises:
        PolicyError: at construction, if `kv_connector_extra_config` is invalid.
    """

    requires_kv_delivery = False  # a lost copy is recomputed
    requires_deferred_block_free = False  # see Preemptions
    saves_before_loads = True  # also those of one request in one step

    def __init__(
        self,
        vllm_config: vllm_api.VllmConfig,
        role: vllm_api.KVConnectorRole,
        kv_cache_config: vllm_api.KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = parse_section(SwapConfig, given, "kv_connector_extra_config")
        self.cache_config = kv_cache_config
        self.unsupported = why_unsupported(vllm_config, kv_cache_config)
        self.slots = 0 if self.unsupported else host_slots(kv_cache_config, config.host_gib)
        self.backend = CopyBackend()  # makes no copy before a worker's KV cache is registered
        groups = kv_cache_config.kv_cache_groups
        self.block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.ledger = SwapLedger(HostPool(self.slots), self.block_sizes)
        self._workers: int = vllm_config.parallel_config.world_size
        self.measured = {"save": 0.0, "load": 0.0}  # total seconds of copies
        self.failures: Counter[str] = Counter()  # exceptions that were caught, by method
        self.failed = FailedCopies(slots=self.slots)
        self._failed_proof: FailedProof | None = None

    def refuse_copies(self, reason: str) -> None:
        """Swap no KV: it will be recomputed."""
        self._failed_proof = FailedProof(reason)
        self.unsupported = f"copies on this device are wrong: {reason}"
        self.ledger.pool = HostPool(0)

    def _no_swap(self, *args: Any, **kwargs: Any) -> None:
        error = sys.exception()
        self.refuse_copies(f"{type(error).__name__}: {error}")

    # Worker side

    @guarded(_no_swap)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocate the host pool for these caches, by layer, and try some copies (`why_wrong`)."""
        if not self.slots:
            return
        regions = block_regions(kv_caches.values(), self.cache_config.num_blocks)
        backend = make_backend(regions, self.slots)
        wrong = why_wrong(backend, regions, self.slots)
        if wrong is not None:
            self.refuse_copies(wrong)
            return
        self.backend = backend
        gib = self.slots * sum(region.shape[1] for region in regions) / 2**30
        logger.info("KV swap: %d blocks, %.2f GiB of host memory.", self.slots, gib)

    def _no_proof(self) -> vllm_api.KVConnectorHandshakeMetadata | None:
        return None

    @guarded(_no_proof)
    def get_handshake_metadata(self) -> vllm_api.KVConnectorHandshakeMetadata | None:
        """Why copies are wrong; nothing if they are right, because a MultiConnector passes on the
        first metadata that it gets."""
        return self._failed_proof

    def _not_saved(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, SwapMetadata)
        saves = kv_connector_metadata.orders.saves
        for save in saves:
            self.failed.give_up_save(save)
        saves.clear()

    @guarded(_not_saved)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Save victims' blocks before the step overwrites them."""
        assert isinstance(kv_connector_metadata, SwapMetadata)
        for save in _one_by_one(kv_connector_metadata.orders.saves):
            if any(run.stop > self.slots for run in save.host):  # other pools are larger
                self.failed.give_up_save(save)
                continue
            self.backend.save(save.device, save.host, save.number)
            self.failed.unsaved.difference_update(save.slots)

    def _not_loaded(self, *args: Any, **kwargs: Any) -> None:
        metadata = self.step_metadata
        assert isinstance(metadata, SwapMetadata)
        loads = metadata.orders.loads
        for load in loads:
            self.failed.give_up(load)
        loads.clear()

    @guarded(_not_loaded)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the KV of the requests that resume in this step, whole and not by layer."""
        metadata = self.step_metadata
        assert isinstance(metadata, SwapMetadata)
        for load in _one_by_one(metadata.orders.loads):
            if self.failed.unsaved.isdisjoint(load.slots):
                key = load.request_id if load.beside else None
                self.backend.load(load.device, load.host, key)
            else:
                self.failed.give_up(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: the device itself waits for loads."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """No-op: `handle_preemptions` saves."""

    def wait_for_save(self) -> None:
        """No-op: the device itself waits for saves."""

    def _all_finished(self, *args: Any, **kwargs: Any) -> tuple[set[str] | None, set[str] | None]:
        # Wait for the copies beside steps, so that none is waited for in vain.
        self.failed.drain(self.backend)
        return None, take(self.failed.requests) or None

    @guarded(_all_finished)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids of saved and of loaded requests. The former are always None: `SwapReport` has the
        ends of saves."""
        loaded = self.backend.finished() | take(self.failed.requests)
        return None, loaded or None

    def _only_failures(self) -> SwapReport | None:
        # No seconds, but the copies that were not made, and all saves.
        self.failed.drain(self.backend)
        return self.failed.report()

    @guarded(_only_failures)
    def build_connector_worker_meta(self) -> SwapReport | None:
        """What has happened to this worker's copies since the last call; None for nothing."""
        save_seconds, load_seconds = self.backend.take_seconds()
        self.failed.saves += self.backend.saved()
        return self.failed.report(save_seconds, load_seconds)

    # Scheduler side

    def _forget(self, request_id: str, save: int | None = None) -> None:
        """Forget a request's copy, and free the blocks kept for a save. If that fails, too, no copy
        is loaded any more, and this one becomes free when a request ends."""
        try:
            self.ledger.kept.free(save)
            self.ledger.release(request_id)
        except Exception:
            self.ledger.distrust()
            self.failed.ended.add(request_id)

    @guarded(_no_swap)
    def bind_kv_cache_manager(self, kv_cache_manager: vllm_api.KVCacheManager) -> None:
        """Called once, before the first request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.cache_manager = kv_cache_manager
        self.ledger.null_block = kv_cache_manager.block_pool.null_block.block_id
        self.ledger.kept = KeptBlocks(
            partial(vllm_api.free_blocks, kv_cache_manager), self._workers
        )

    @guarded(_no_swap)
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, vllm_api.KVConnectorHandshakeMetadata]
    ) -> None:
        """Called before the first request, with what the workers said."""
        for failure in metadata.values():
            if isinstance(failure, FailedProof):
                self.refuse_copies(failure.reason)
                logger.warning(
                    "KV swap is off, and the KV of preempted requests is recomputed: %s.",
                    self.unsupported,
                )
                return

    @guarded(lambda self, request: tuple[int, ...]())
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All groups that can be transferred: a load fills all of them."""
        return self.cache_config.transfer_group_ids

    def save(
        self, request: Request, start: int, end: int, hash_block_size: int, beside: bool
    ) -> bool:
        """Order a save of a running request's KV for tokens `start` to `end`, before its blocks are
        freed; False if the host pool is too small. `hash_block_size`: tokens per entry of
        `request.block_hashes`. `beside`: keep the blocks allocated until they are saved, so that no
        step waits for that."""
        blocks = self.cache_manager.get_block_ids(request.request_id)
        fingerprint = partial(_fingerprint, request, end, hash_block_size)
        saved = fingerprint()

        def unchanged() -> bool:  # a session may remove tokens
            return fingerprint() == saved

        keep = partial(vllm_api.keep_blocks, self.cache_manager, request) if beside else None
        return self.ledger.save(
            request.request_id, blocks, start, end, still_valid=unchanged, keep=keep
        )

    def _no_copy(self, request: Request, *args: Any, **kwargs: Any) -> tuple[int | None, bool]:
        self._forget(request.request_id)
        return 0, False

    @guarded(_no_copy)
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `SwapLedger.loadable`."""
        if request.skip_reading_prefix_cache:
            return 0, False
        self.failed.asked = request.request_id, num_computed_tokens
        return self.ledger.loadable(request.request_id, num_computed_tokens, request.num_tokens)

    def _not_ordered(
        self, request: Request, blocks: vllm_api.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._forget(request.request_id)
        if not num_external_tokens:
            return
        # vLLM counts on these tokens already: report their blocks as not loaded.
        asked, on_device = self.failed.asked
        first = on_device if asked == request.request_id else 0
        for table, size in zip(blocks.get_block_ids(), self.block_sizes, strict=True):
            self.failed.blocks.update(table[first // size :])
        self.failed.requests.add(request.request_id)

    @guarded(_not_ordered)
    def update_state_after_alloc(
        self, request: Request, blocks: vllm_api.KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the load of a request that got its blocks; see `SwapLedger.admitted`."""
        name = request.request_id
        if name in self.failed.loaded:  # of an earlier load
            self.ledger.load_finished((name,))
            self.failed.loaded.discard(name)
        table = blocks.get_block_ids()
        self.ledger.admitted(name, table, num_external_tokens, request.num_tokens)

    def _nothing_ordered(self, *args: Any, **kwargs: Any) -> KVConnectorMetadata:
        orders = self.ledger.cancel_orders()
        for load in orders.loads:
            self.failed.give_up(load)
            if load.beside:
                self.failed.loaded.add(load.request_id)
        for save in orders.saves:
            self._forget(save.request_id, save.number)
        return SwapMetadata(Orders())

    @guarded(_nothing_ordered)
    def build_connector_meta(
        self, scheduler_output: vllm_api.SchedulerOutput
    ) -> KVConnectorMetadata:
        """The copies that the workers make in the coming step."""
        # Newer model runners make these copies before they call `handle_preemptions`.
        copies: Iterable[Any] = scheduler_output.kv_cache_block_copies or ()
        return SwapMetadata(self.ledger.take_orders(copy.dst_block_id for copy in copies))

    def what_is_missing(self, connector_output: KVConnectorOutput | None) -> set[int]:
        """Remove and return the blocks that loads of this step and steps before did not fill, by
        the workers' reports and by orders that failed here."""
        report: Any = getattr(connector_output, "kv_connector_worker_meta", None)
        for part in getattr(report, "metadata", (report,)):  # of a MultiConnector
            if isinstance(part, SwapReport):
                self.failed.blocks |= part.unloaded
        return take(self.failed.blocks)

    def _noted_later(self, connector_output: KVConnectorOutput) -> None:
        # What finished loads and saves used becomes free with the next call.
        self.failed.note(connector_output)

    @guarded(_noted_later)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take in the workers' report of a step, and free what its copies used."""
        report = self.failed.note(connector_output)
        self.ledger.load_finished(self.failed.loaded)
        self.failed.loaded.clear()
        if report is not None:
            self.measured["save"] += report.save_seconds
            self.measured["load"] += report.load_seconds
            if report.slots < self.ledger.pool.slots:
                self._shrink(report.slots)
        self.ledger.kept.saved(self.failed.saves)

    def _shrink(self, slots: int) -> None:
        """Use no more slots than the worker with the smallest host pool has."""
        logger.warning(
            "KV swap: %d of %d blocks of host memory are used, because a worker has no more; give "
            "the same host_gib on every node.",
            slots,
            self.ledger.pool.slots,
        )
        self.ledger.pool.shrink(slots)
        if not slots:
            self.unsupported = "a worker's host pool is smaller than one KV block"

    def _released_later(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        # The copy of this request becomes free when the next one ends.
        self.failed.ended.add(request.request_id)
        return False, None

    @guarded(_released_later)
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the copies of this request and of earlier ones that could not be forgotten. The
        engine may free the request's blocks at once."""
        ended = self.failed.ended
        ended.add(request.request_id)
        for request_id in list(ended):
            self.ledger.release(request_id)
            ended.discard(request_id)
        return False, None

    @guarded(_released_later)
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`; for models with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _not_reset(self) -> bool | None:
        # The copies stay where they are, and nobody loads them.
        self.ledger.distrust()
        return False

    @guarded(_not_reset)
    def reset_cache(self) -> bool | None:
        """Drop every host copy, because the weights may have changed; False while loads are in
        flight, which cannot be undone."""
        self.ledger.release_all()
        return not self.ledger.loading


def _one_by_one(orders: list[Transfer]) -> Iterator[Transfer]:
    """Yield orders, those beside steps last, and remove each once carried out: some model runners
    call the same method twice per step, and those left after an error are given up."""
    orders.sort(key=attrgetter("beside"), reverse=True)
    while orders:
        yield orders[-1]
        orders.pop()


def _fingerprint(request: Request, end: int, hash_block_size: int) -> tuple[Any, ...]:
    """The hash of the last whole block, which covers all before it, and the tokens after it."""
    blocks = min(end // hash_block_size, len(request.block_hashes))
    last = request.block_hashes[blocks - 1] if blocks else None
    return last, *request.all_token_ids[blocks * hash_block_size : end]
