"""The copies of vLLM's own connectors that offload KV to host memory, on the emulated device's copy
queue: `OffloadingConnector` and `SimpleCPUOffloadConnector`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.device.runner import Runner


def offload_by(runner: "Runner", connector: Any) -> None:
    """Let one of vLLM's two connectors, on the worker's side, copy on the emulated device; others
    are left as they are."""
    copies = OffloadingCopies(runner)
    if getattr(connector, "connector_worker", None) is not None:
        worker = connector.connector_worker
        worker.worker = EmulatedOffloading(copies, worker.spec.blocks_per_chunk)
    elif getattr(connector, "worker_handler", None) is not None:
        worker = connector.worker_handler
        worker._backend = EmulatedBackend(copies)
        worker.wait_for_save = lambda: _save(worker)


class OffloadingCopies:
    """Copies between blocks and slots of a host pool of their own, beside steps."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        groups = runner.sanitizer.groups
        self._tokens_per_block = groups[0].block_size / len(groups)

    def copy(self, blocks: Sequence[int], slots: Sequence[int], save: bool) -> float:
        """Queue a copy; when it ends."""
        runner = self.runner
        tokens = round(len(blocks) * self._tokens_per_block)
        seconds = runner.profile.save(tokens) if save else runner.profile.load(tokens)
        begin, end = runner.timeline.copy(runner.clock.now(), seconds, beside=True)
        move: Callable[..., None] = runner.sanitizer.copy_in
        if save:
            move = runner.sanitizer.copy_out
        name = f"an offloading {'save' if save else 'load'} of step {runner.number}"
        for block, slot in zip(blocks, slots, strict=True):
            place: Hashable = (self, slot)  # not one of another connector
            move(int(block), place, begin, end, name, True)
        return end


class EmulatedOffloading(OffloadingWorker):
    """For `OffloadingConnector`. Slots of the host hold chunks of several blocks."""

    def __init__(self, copies: OffloadingCopies, blocks_per_chunk: int) -> None:
        self._copies = copies
        self._blocks_per_chunk = blocks_per_chunk
        self._ends: dict[int, float] = {}  # by number of the job

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Queue a save."""
        return self._submit(job_id, src_spec, dst_spec, save=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue a load."""
        return self._submit(job_id, dst_spec, src_spec, save=False)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call."""
        now = self._copies.runner.clock.now()
        ended = [job for job, end in self._ends.items() if end <= now]
        for job in ended:
            del self._ends[job]
        return [TransferResult(job_id=job, success=True) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""
        ends = [self._ends[job] for job in job_ids if job in self._ends]
        self._copies.runner.clock.wait_until(max(ends, default=0.0))

    def _submit(self, job: int, device: GPULoadStoreSpec, host: LoadStoreSpec, save: bool) -> bool:
        assert isinstance(host, BlockIDsLoadStoreSpec)
        slots = self._slots(device, [int(chunk) for chunk in host.block_ids])
        self._ends[job] = self._copies.copy(device.block_ids.tolist(), slots, save)
        return True

    def _slots(self, device: GPULoadStoreSpec, chunks: list[int]) -> list[int]:
        """The slot of each block. A group's first block may be in the middle of its first chunk."""
        size = self._blocks_per_chunk
        slots = []
        used = 0  # chunks of the groups before
        for count, first in zip(device.group_sizes, device.block_indices, strict=True):
            skipped = first % size
            places = range(skipped, skipped + count)
            slots += [chunks[used + place // size] * size + place % size for place in places]
            used += -(-places.stop // size) if count else 0
        return slots


@dataclass
class _Event:
    """Stands for a CUDA event."""

    copies: OffloadingCopies
    end: float

    def query(self) -> bool:
        return self.copies.runner.clock.now() >= self.end

    def synchronize(self) -> None:
        self.copies.runner.clock.wait_until(self.end)


class EmulatedBackend:
    """For `SimpleCPUOffloadConnector`: in place of its `DmaCopyBackend`."""

    def __init__(self, copies: OffloadingCopies) -> None:
        self._copies = copies

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
    ) -> None:
        """Queue a copy, and append its event to those that the connector polls."""
        device, host = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        end = self._copies.copy(device, host, is_store)
        events_list.append((event_idx, _Event(self._copies, end)))

    def shutdown(self) -> None:
        """No-op: there is no thread."""


def _save(worker: Any) -> None:
    """The connector's `wait_for_save`, without the CUDA event that it records: a copy waits for the
    steps before it in any case."""
    metadata = worker._connector_metadata
    if metadata is not None and metadata.store_gpu_blocks:
        worker._backend.launch_copy(
            metadata.store_gpu_blocks,
            metadata.store_cpu_blocks,
            is_store=True,
            event_idx=metadata.store_event,
            events_list=worker._store_events,
        )
