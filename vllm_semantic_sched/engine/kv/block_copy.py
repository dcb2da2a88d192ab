"""Copies KV blocks between device and host: a backend for each kind of device."""

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", int, str)
Blocks = Sequence[int]
Slots = Sequence[range]
HasEnded = Callable[[], bool]


class UnsupportedLayout(ValueError):
    """The KV cache does not store each block in contiguous memory."""


class CopyBackend:
    """Copies blocks of one worker's KV cache. A block is a row of every region. Block `device[i]`
    is copied to or from the i-th slot of `host`."""

    def __init__(self) -> None:
        self._saves: dict[int, HasEnded] = {}  # beside steps
        self._loads: dict[str, HasEnded] = {}
        self._seconds = {"save": 0.0, "load": 0.0}

    def _copy(self, what: str, device: Blocks, host: Slots, beside: bool = False) -> HasEnded:
        """Begin a copy ("save" or "load"), for which device work queued later waits unless it is
        `beside` it; a function that tells whether it has ended."""
        raise NotImplementedError("no KV cache is registered")

    def save(self, device: Blocks, host: Slots, number: int | None = None) -> None:
        """Copy to the host. Device work queued after this call may overwrite the blocks. With a
        number, the device works on meanwhile, and nothing may before `saved` reports the end."""
        has_ended = self._copy("save", device, host, beside=number is not None)
        if number is not None:
            self._saves[number] = has_ended

    def load(self, device: Blocks, host: Slots, key: str | None = None) -> None:
        """Copy to the device. Device work queued after this call may read the blocks. With a key,
        the device works on meanwhile, and nothing may before `finished` reports the end."""
        has_ended = self._copy("load", device, host, beside=key is not None)
        if key is not None:
            self._loads[key] = has_ended

    def finished(self) -> set[str]:
        """Keys of the loads that ended since the last call."""
        return _take_ended(self._loads)

    def saved(self) -> set[int]:
        """Numbers of the saves that ended since the last call."""
        return _take_ended(self._saves)

    def drain(self) -> tuple[set[str], set[int]]:
        """Wait for all copies; what `finished` and `saved` would have reported."""
        copies = set(self._loads), set(self._saves)
        self._loads = {}
        self._saves = {}
        return copies

    def take_seconds(self) -> tuple[float, float]:
        """Seconds of saves and of loads since the last call, as far as measured."""
        seconds = self._seconds
        self._seconds = {"save": 0.0, "load": 0.0}
        return seconds["save"], seconds["load"]


def _take_ended(copies: dict[Key, HasEnded]) -> set[Key]:
    """Remove and return the keys of the copies that have ended."""
    ended = {key for key, has_ended in copies.items() if has_ended()}
    for key in ended:
        del copies[key]
    return ended


def block_regions(caches: Iterable[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """A KV cache as bytes: a uint8 tensor [num_blocks, bytes per block] for each region of memory;
    layers that share storage (groups of a hybrid model) have one. Kernel blocks of `caches` may be
    smaller than blocks. UnsupportedLayout: a block of some layer is not contiguous."""
    from vllm_semantic_sched.engine.vllm_api import group_kernel_blocks

    regions: dict[tuple[int, int, int], torch.Tensor] = {}
    for cache in caches:
        blocks = group_kernel_blocks(cache, num_blocks)
        size = blocks.element_size()
        page = blocks[0].numel() * size
        shape = tuple(blocks.shape[1:])
        strides = tuple(blocks.stride()[1:])
        span = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if (span + 1) * size != page:
            raise UnsupportedLayout(
                f"a KV block of shape {shape} and strides {strides} is not contiguous; set "
                "VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC, or start without the connector"
            )
        stride = blocks.stride(0) * size
        place = (blocks.data_ptr(), stride, page)
        if place not in regions:
            raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
            offset = blocks.storage_offset() * size
            regions[place] = raw.set_(
                blocks.untyped_storage(), offset, (num_blocks, page), (stride, 1)
            )
    return list(regions.values())


def _as_words(region: torch.Tensor) -> torch.Tensor:
    """The same bytes in the widest integer type that fits, which torch copies faster."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if not any(n % size for n in (region.shape[1], region.stride(0), region.data_ptr())):
            return region.view(dtype)
    return region


class CpuCopies(CopyBackend):
    """Copies at once: a thread beside steps would take cores from the forward pass. torch gathers
    rows fastest; NumPy scatters them at twice torch's speed."""

    def __init__(self, regions: Sequence[torch.Tensor], slots: int) -> None:
        super().__init__()
        self.device = [_as_words(region) for region in regions]
        self.host = [
            torch.empty((slots, region.shape[1]), dtype=region.dtype) for region in self.device
        ]

    @torch.inference_mode()  # vLLM allocates KV in this mode but may call from outside it
    def _copy(self, what: str, device: Blocks, host: Slots, beside: bool = False) -> HasEnded:
        start = time.perf_counter()
        done = 0
        for run in host:
            blocks = torch.tensor(device[done : done + len(run)], dtype=torch.int64)
            done += len(run)
            for cache, pool in zip(self.device, self.host, strict=True):
                rows = pool[run.start : run.stop]
                if what == "save":
                    torch.index_select(cache, 0, blocks, out=rows)
                else:
                    cache.numpy()[blocks.numpy()] = rows.numpy()
        self._seconds[what] += time.perf_counter() - start
        return lambda: True


class CudaCopies(CopyBackend):
    """Copies through pinned host memory on a side stream, with vLLM's batched block copy; the host
    never waits. The side stream waits for work queued earlier, which may still write the blocks.
    Seen on an H200, with one `cudaMemcpyAsync` per block in place of vLLM's copy; not yet within
    vLLM. So it proves itself at every start (`why_wrong`).

    Args:
        copy: copies `(sources, targets, sizes)`: addresses and bytes, int64.
        pin: pins a host tensor in place, for asynchronous copies.
        cuda: `torch.cuda`, or a fake in tests.
    """

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        slots: int,
        copy: Any,
        pin: Any,
        cuda: Any = torch.cuda,
    ) -> None:
        super().__init__()
        self._cuda = cuda
        self._batched_copy = copy
        self._stream = cuda.Stream()
        self._device = list(regions)
        self._host = [
            torch.empty((slots, region.shape[1]), dtype=torch.uint8) for region in regions
        ]
        for rows in self._host:
            pin(rows)
        places = [rows.data_ptr() for rows in self._host]
        unpin = weakref.finalize(self, _unpin, cuda, self._stream, places)
        unpin.atexit = False
        self._timed: list[tuple[str, Any, Any]] = []

    def drain(self) -> tuple[set[str], set[int]]:
        """See `CopyBackend.drain`."""
        self._stream.synchronize()
        return super().drain()

    def take_seconds(self) -> tuple[float, float]:
        """See `CopyBackend.take_seconds`; the time of a copy under way comes later."""
        timed = self._timed
        self._timed = []
        for what, begin, end in timed:
            if end.query():
                self._seconds[what] += begin.elapsed_time(end) / 1000
            else:
                self._timed.append((what, begin, end))
        return super().take_seconds()

    def _copy(self, what: str, device: Blocks, host: Slots, beside: bool = False) -> HasEnded:
        slots = torch.tensor(list(itertools.chain(*host)), dtype=torch.int64)
        blocks = torch.tensor(device, dtype=torch.int64)
        on_device = []
        on_host = []
        sizes = []
        for region, rows in zip(self._device, self._host, strict=True):
            on_device.append(region.data_ptr() + blocks * region.stride(0))
            on_host.append(rows.data_ptr() + slots * rows.stride(0))
            sizes.append(torch.full_like(blocks, region.shape[1]))
        device_ends = torch.cat(on_device)
        host_ends = torch.cat(on_host)
        if what == "save":
            sources, targets = device_ends, host_ends
        else:
            sources, targets = host_ends, device_ends
        begin = self._cuda.Event(enable_timing=True)
        end = self._cuda.Event(enable_timing=True)
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record(self._stream)
            self._batched_copy(sources, targets, torch.cat(sizes))
            end.record(self._stream)
        self._timed.append((what, begin, end))
        if not beside:
            self._cuda.current_stream().wait_stream(self._stream)
        return lambda: bool(end.query())


def _unpin(cuda: Any, stream: Any, places: Sequence[int]) -> None:
    """Unpin host memory before it is freed: else the next pinned allocation at its address fails
    ("resource already mapped"), whoever makes it."""
    stream.synchronize()
    for place in places:
        cuda.cudart().cudaHostUnregister(place)


def make_backend(regions: Sequence[torch.Tensor], slots: int) -> CopyBackend:
    """The backend for the device of the regions; UnsupportedLayout if there is none."""
    kind = regions[0].device.type
    if kind == "cpu":
        return CpuCopies(regions, slots)
    if kind == "cuda":
        from vllm_semantic_sched.engine.vllm_api import block_copy_and_pin

        copy, pin = block_copy_and_pin()
        return CudaCopies(regions, slots, copy, pin)
    raise UnsupportedLayout(
        f"KV swap supports CPU and CUDA devices, not {kind!r}; start without the connector"
    )


_PROOF_SECONDS = 30.0


@torch.inference_mode()
def why_wrong(backend: CopyBackend, regions: Sequence[torch.Tensor], slots: int) -> str | None:
    """Save, overwrite, load and compare some blocks while the device computes: what came back
    wrong, in a step or beside one; None if nothing did. The KV cache must not be in use yet; its
    bytes are as before afterwards."""
    blocks = list(range(min(4, slots, regions[0].shape[0])))
    host = [range(len(blocks))]
    before = [region[blocks].clone() for region in regions]
    for beside, way in ((False, "before a step"), (True, "beside a step")):
        patterns = [torch.randint_like(rows, 256) for rows in before]
        _compute(regions[0].device)
        for region, pattern in zip(regions, patterns, strict=True):
            region[blocks] = pattern
        backend.save(blocks, host, number=0 if beside else None)
        if beside and not _ended(backend.saved):
            return f"a save beside the computation took more than {_PROOF_SECONDS:g} s"
        for region in regions:
            region[blocks] = 0
        _compute(regions[0].device)
        backend.load(blocks, host, key="proof" if beside else None)
        if beside and not _ended(backend.finished):
            return f"a load beside the computation took more than {_PROOF_SECONDS:g} s"
        for index, (region, pattern) in enumerate(zip(regions, patterns, strict=True)):
            if not torch.equal(region[blocks], pattern):
                return f"blocks of region {index} that were loaded {way} differ from those saved"
    for region, rows in zip(regions, before, strict=True):
        region[blocks] = rows
    backend.take_seconds()
    return None


def _compute(device: torch.device) -> None:
    """Queue work on the compute stream: a copy that does not wait for it comes too early."""
    size = 32 if device.type == "cpu" else 2048
    product = torch.ones((size, size), device=device)
    for _ in range(20):  # some milliseconds
        product = product @ product * 0


def _ended(ended: Callable[[], set[Any]]) -> bool:
    end = time.monotonic() + _PROOF_SECONDS
    while not ended():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
