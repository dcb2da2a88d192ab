"""Copies of KV blocks in every layout, and the order of events with a fake CUDA."""

import pytest
import torch

from vllm_semantic_sched.engine.kv import block_copy
from vllm_semantic_sched.engine.kv.block_copy import (
    CpuCopies,
    CudaCopies,
    UnsupportedLayout,
    block_regions,
    why_wrong,
)

BLOCKS, HEADS, TOKENS, SIZE = 10, 2, 4, 6


def layer_cache(layout: str, kernel_blocks: int = 1) -> torch.Tensor:
    """A layer's cache [blocks, heads, tokens, size] stored in some order of these dimensions."""
    shape = {"B": BLOCKS * kernel_blocks, "H": HEADS, "N": TOKENS // kernel_blocks, "C": SIZE}
    stored = torch.randn([shape[dimension] for dimension in layout])
    return stored.permute([layout.index(dimension) for dimension in "BHNC"])


@pytest.mark.parametrize("layout", ["BHNC", "BNHC"])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_blocks_are_restored_bit_by_bit(layout, kernel_blocks, dtype) -> None:
    caches = [layer_cache(layout, kernel_blocks).to(dtype) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    copies = CpuCopies(block_regions([*caches, caches[0]], BLOCKS), slots=8)
    assert len(copies.host) == 3  # a layer that shares storage is copied once
    copies.save([7, 2, 5], [range(4, 6), range(0, 1)])
    for cache in caches:
        cache.fill_(0)
    copies.load([1, 3, 9], [range(4, 6), range(0, 1)])
    for cache, old in zip(caches, before, strict=True):
        blocks = cache.unflatten(0, (BLOCKS, kernel_blocks))
        saved = old.unflatten(0, (BLOCKS, kernel_blocks))
        for source, target in ((7, 1), (2, 3), (5, 9)):
            assert torch.equal(blocks[target], saved[source])
        untouched = [block for block in range(BLOCKS) if block not in (1, 3, 9)]
        assert not blocks[untouched].any()
    saves, loads = copies.take_seconds()
    assert saves > 0 < loads and copies.take_seconds() == (0.0, 0.0)


@pytest.mark.parametrize("allocating", [False, True])
@pytest.mark.parametrize("copying", [False, True])
def test_copies_work_in_and_outside_inference_mode(allocating, copying) -> None:
    with torch.inference_mode(allocating):
        cache = layer_cache("BHNC")
        copies = CpuCopies(block_regions([cache], BLOCKS), slots=1)
    with torch.inference_mode(copying):
        copies.save([2], [range(0, 1)])
        copies.load([7], [range(0, 1)])
    assert torch.equal(cache[7], cache[2])


class Forgetful(CpuCopies):
    """Leaves some blocks out, or is never done with a load beside steps."""

    def __init__(self, *args, left_out: str) -> None:
        super().__init__(*args)
        self.left_out = left_out

    def save(self, device, host, number=None) -> None:
        if self.left_out == "save":
            device, host = device[:-1], [range(host[0].start, host[0].stop - 1)]
        super().save(device, host, number)

    def saved(self) -> set[int]:
        return set() if self.left_out == "end of a save" else super().saved()

    def load(self, device, host, key=None) -> None:
        if self.left_out != ("load" if key is None else "end of a load"):
            super().load(device, host, key)
        if key is not None and self.left_out == "beside":
            self.device[0][device] = 0


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        ("nothing", None),
        ("save", "blocks of region 0 that were loaded before a step differ"),
        ("load", "blocks of region 0 that were loaded before a step differ"),
        ("beside", "blocks of region 0 that were loaded beside a step differ"),
        ("end of a save", "a save beside the computation took more than 0 s"),
        ("end of a load", "a load beside the computation took more than 0 s"),
    ],
)
def test_copies_prove_themselves(left_out, reason, monkeypatch) -> None:
    monkeypatch.setattr(block_copy, "_PROOF_SECONDS", 0.0)
    caches = [layer_cache("BHNC"), layer_cache("BNHC")]
    before = [cache.clone() for cache in caches]
    regions = block_regions(caches, BLOCKS)
    found = why_wrong(Forgetful(regions, 8, left_out=left_out), regions, 8)
    assert found is None if reason is None else reason in found
    if reason is None:
        assert all(torch.equal(one, old) for one, old in zip(caches, before, strict=True))


def test_layers_within_a_block_are_distinguished() -> None:
    """The pages of all layers of a block are adjacent, so blocks of one layer are not."""
    stored = torch.randn(BLOCKS, 3, HEADS, TOKENS, SIZE)
    before = stored.clone()
    copies = CpuCopies(block_regions(stored.unbind(1), BLOCKS), slots=2)
    copies.save([4], [range(1, 2)])
    stored.fill_(0)
    copies.load([6], [range(1, 2)])
    assert torch.equal(stored[6], before[4])
    assert not stored[[block for block in range(BLOCKS) if block != 6]].any()


def test_non_contiguous_block_is_rejected() -> None:
    with pytest.raises(UnsupportedLayout, match="VLLM_KV_CACHE_LAYOUT"):
        block_regions([layer_cache("HBNC")], BLOCKS)


def test_copy_beside_steps_is_reported_once() -> None:
    cache = layer_cache("BHNC")
    copies = CpuCopies(block_regions([cache], BLOCKS), slots=2)
    copies.load([1], [range(0, 1)], "a")
    assert (copies.finished(), copies.finished()) == ({"a"}, set())
    copies.save([1], [range(0, 1)], 3)
    assert (copies.saved(), copies.saved()) == ({3}, set())


class FakeStream:
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"off {self.name}")


class FakeEvent:
    def __init__(self, log: list) -> None:
        self.log, self.done = log, False

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"event on {stream.name}")

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 250.0


class FakeCuda:
    """Replaces torch.cuda; copies by address at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self.current = FakeStream(self.log, "compute")

    def Stream(self) -> FakeStream:
        return FakeStream(self.log, "side")

    def current_stream(self) -> FakeStream:
        return self.current

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def Event(self, enable_timing: bool) -> FakeEvent:
        self.events.append(FakeEvent(self.log))
        return self.events[-1]

    def cudart(self) -> "FakeCuda":
        return self

    def cudaHostUnregister(self, place: int) -> int:
        self.log.append(f"unpin {place}")
        return 0

    def copy(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        import ctypes

        assert sources.dtype == targets.dtype == sizes.dtype == torch.int64
        self.log.append("copy")
        for source, target, size in zip(
            sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)


def test_cuda_copies_and_compute_wait_for_each_other() -> None:
    """With a fake stream, so it proves nothing about real hardware."""
    cuda, pinned = FakeCuda(), []
    caches = [layer_cache("BHNC"), layer_cache("BNHC")]
    before = [cache.clone() for cache in caches]
    copies = CudaCopies(
        block_regions(caches, BLOCKS), 8, cuda=cuda, copy=cuda.copy, pin=pinned.append
    )
    assert [rows.shape[0] for rows in pinned] == [8, 8]
    around = ["side waits for compute", "on side", "event on side", "copy", "event on side"]
    copies.save([7, 2], [range(4, 5), range(0, 1)])
    assert cuda.log == [*around, "off side", "compute waits for side"]
    for cache in caches:
        cache.fill_(0)
    cuda.log.clear()
    copies.load([1, 3], [range(4, 5), range(0, 1)])
    assert cuda.log == [*around, "off side", "compute waits for side"]
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[1], old[7]) and torch.equal(cache[3], old[2])
    cuda.log.clear()
    copies.load([5], [range(4, 5)], "a")
    assert cuda.log == [*around, "off side"]  # compute goes on
    cuda.log.clear()
    copies.save([5], [range(4, 5)], 3)
    assert cuda.log == [*around, "off side"]
    assert copies.finished() == copies.saved() == set()
    assert copies.take_seconds() == (0.0, 0.0)  # nothing has waited for the device
    for event in cuda.events:
        event.done = True
    assert (copies.finished(), copies.finished()) == ({"a"}, set())
    assert (copies.saved(), copies.saved()) == ({3}, set())
    assert copies.take_seconds() == (0.5, 0.5)
    assert copies.take_seconds() == (0.0, 0.0)


def test_host_memory_is_unpinned_before_it_is_freed() -> None:
    """As when copies turn out to be wrong: what is pinned next may get the same addresses."""
    cuda, places = FakeCuda(), []
    copies = CudaCopies(
        block_regions([layer_cache("BHNC")], BLOCKS),
        8,
        cuda=cuda,
        copy=cuda.copy,
        pin=lambda rows: places.append(rows.data_ptr()),
    )
    assert cuda.log == []
    del copies
    assert cuda.log == ["wait for side", f"unpin {places[0]}"]
