"""KV copies and the figures of the roofline, with torch and without vLLM; a step of
`scripts/gpu_check.sh check`.

1. The swap connector's copies prove themselves, in place of vLLM's batched copy with one
   `cudaMemcpyAsync` per block.
2. A load beside matrix products: seconds of both, alone and together.
3. Matrix products, reads of memory and copies, beside the figures of devices.yaml.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import main

from vllm_semantic_sched.engine.kv.block_copy import CpuCopies, CudaCopies, why_wrong
from vllm_semantic_sched.engine.startup.device_benchmark import measure_device
from vllm_semantic_sched.policy.profile.devices import recognize
from vllm_semantic_sched.policy.profile.model_shape import ModelShape

# Regions, their blocks, bytes of a block, blocks copied: 16 tokens of one layer of a model of
# 8 billion parameters, and of all layers.
SHAPES = ((4, 4096, 2**16, 1024), (1, 512, 2**21, 256))
_ANY_DIRECTION = 4  # cudaMemcpyDefault


def copy_each(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
    """Stands for vLLM's `swap_blocks_batch`, on the current stream."""
    major = str(torch.version.cuda).partition(".")[0]
    copy = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyAsync
    copy.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    stream = torch.cuda.current_stream().cuda_stream
    triples = zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
    for source, target, size in triples:
        status = copy(target, source, size, _ANY_DIRECTION, stream)
        if status:
            raise RuntimeError(f"cudaMemcpyAsync failed with {status}")


def pin(rows: torch.Tensor) -> None:
    """Pin a host tensor in place."""
    size = rows.numel() * rows.element_size()
    status = int(torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), size, 0))
    if status:
        raise RuntimeError(f"cudaHostRegister failed with {status}")


def seconds(work: Callable[[], object], wait: Callable[[], None], repeats: int = 5) -> float:
    """The fastest of some runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)


def check_copies(device: str, wait: Callable[[], None]) -> bool:
    """Print steps 1 and 2; whether all bytes came back."""
    matrix = torch.full((4096 if device == "cuda" else 256,) * 2, 0.01, device=device)

    def products() -> None:
        for _ in range(50):
            torch.mm(matrix, matrix)

    right = True
    alone = seconds(products, wait)
    for count, blocks, size, slots in SHAPES:
        regions = [
            torch.zeros((blocks, size), dtype=torch.uint8, device=device) for _ in range(count)
        ]
        backend: Any = CpuCopies(regions, slots)
        if device == "cuda":
            backend = CudaCopies(regions, slots, copy=copy_each, pin=pin)
        wrong = why_wrong(backend, regions, slots)
        right = right and wrong is None
        print(f"blocks of {size >> 10} KiB:", wrong or "all came back, in a step and beside one")
        chosen = torch.randperm(blocks)[:slots].tolist()
        host = [range(slots)]

        def both(backend: Any = backend, chosen: Any = chosen, host: Any = host) -> None:
            backend.load(chosen, host, "load")
            products()

        moved = slots * size * count / 1e9
        saved = seconds(partial(backend.save, chosen, host), wait)
        loaded = seconds(partial(backend.load, chosen, host), wait)
        together = seconds(both, wait)
        print(f"  save {moved / saved:.1f} GB/s, load {moved / loaded:.1f} GB/s ({moved:.2f} GB)")
        print(
            f"  products {alone * 1e3:.1f} ms, load {loaded * 1e3:.1f} ms, both "
            f"{together * 1e3:.1f} ms (one after the other: {(alone + loaded) * 1e3:.1f})"
        )
    return right


def check_roofline(device: str, dtype: str) -> None:
    """Print step 3, with the matrices of a model of 8 billion parameters."""
    shape = {
        **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    }
    name = torch.cuda.get_device_name() if device == "cuda" else "this processor"
    known = recognize(name)
    reached = measure_device(device, name, dtype, ModelShape.from_config("8B", shape, dtype))
    print(f"{name}: reached, and of the figures in devices.yaml")
    for field, unit in (("bf16", "TFLOP/s"), ("bandwidth", "GB/s"), ("host", "GB/s, host")):
        value = getattr(reached, field)
        share = "not listed" if known is None else f"{value / getattr(known, field):.2f}"
        print(f"  {value:10.2f} {unit:12} {share}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    devices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", default="auto", choices=devices, help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the steps; 1 if bytes were lost."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    right = check_copies(device, torch.cuda.synchronize if device == "cuda" else lambda: None)
    check_roofline(device, "bfloat16" if device == "cuda" else "float32")
    return int(not right)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
