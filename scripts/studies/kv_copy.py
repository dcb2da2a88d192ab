"""Compare the speed of KV swap's copies with a plain copy of the same bytes."""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import main

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.engine.kv.block_copy import block_regions, make_backend
from vllm_semantic_sched.lab.bench.server import has_gpu

_REQUIRED = 0.7


@dataclass(frozen=True)
class Shape:
    """A KV cache, and the number of its tokens to copy."""

    layers: int
    heads: int
    head_size: int
    block_size: int
    tokens: int
    dtype: str
    device: str


def measure(shape: Shape, repeats: int) -> tuple[int, dict[str, float]]:
    """Copy scattered blocks with the backend and the same bytes as one piece per layer with torch;
    bytes of a copy, and GB/s by kind of copy."""
    dtype = getattr(torch, shape.dtype)
    count = -(-shape.tokens // shape.block_size)
    total = 3 * count
    form = (total, shape.heads, shape.block_size, 2 * shape.head_size)
    caches = [torch.zeros(form, dtype=dtype, device=shape.device) for _ in range(shape.layers)]
    backend = make_backend(block_regions(caches, total), slots=count)
    pinned = shape.device == "cuda"
    plain = [
        torch.zeros((count, *cache.shape[1:]), dtype=dtype, pin_memory=pinned) for cache in caches
    ]
    blocks = random.Random(0).sample(range(total), count)
    host = [range(count)]

    def plain_out() -> None:
        for source, target in zip(caches, plain, strict=True):
            target.copy_(source[:count], non_blocking=True)

    def plain_back() -> None:
        for source, target in zip(plain, caches, strict=True):
            target[:count].copy_(source, non_blocking=True)

    copies: dict[str, Callable[[], None]] = {
        "plain out": plain_out,
        "save": lambda: backend.save(blocks, host),
        "plain back": plain_back,
        "load": lambda: backend.load(blocks, host),
    }
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for repeat in range(repeats + 2):  # the first two touch new memory
        for name, copy in copies.items():
            start = time.perf_counter()
            copy()
            if shape.device == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - start)
    size = sum(target.numel() * target.element_size() for target in plain)
    return size, {name: size / min(times) / 1e9 for name, times in seconds.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; the defaults are a model of about 1.5B parameters."""
    add = parser.add_argument
    add("--layers", type=int, default=28, help="(%(default)s)")
    add("--heads", type=int, default=2, help="KV heads (%(default)s)")
    add("--head-size", type=int, default=128, help="(%(default)s)")
    add("--block-size", type=int, default=32, help="tokens per block (%(default)s)")
    add("--tokens", default="256,1024,4096", help="copied at once (%(default)s)")
    add("--dtype", default="bfloat16", help="torch type of the KV (%(default)s)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(%(default)s)")
    add(
        "--repeats",
        type=int,
        default=25,
        help="of each copy; the fastest counts, as other programs only slow it down (%(default)s)",
    )
    add("--assert-targets", action="store_true", help=f"fail below {_REQUIRED} of a plain copy")


def run(args: argparse.Namespace) -> int:
    """Print GB/s of saves, loads and plain copies; 1 if a target is missed."""
    device = args.device
    if device == "auto":
        device = "cuda" if has_gpu() else "cpu"
    columns = ("tokens", "MB", "plain, out", "save", "plain, back", "load")
    rows = []
    worst = float("inf")
    for tokens in map(int, args.tokens.split(",")):
        shape = Shape(
            args.layers, args.heads, args.head_size, args.block_size, tokens, args.dtype, device
        )
        size, speeds = measure(shape, args.repeats)
        save_share = speeds["save"] / speeds["plain out"]
        load_share = speeds["load"] / speeds["plain back"]
        worst = min(worst, save_share, load_share)
        rows.append(
            (
                tokens,
                f"{size / 1e6:.1f}",
                f"{speeds['plain out']:.1f}",
                f"{speeds['save']:.1f} ({save_share:.2f})",
                f"{speeds['plain back']:.1f}",
                f"{speeds['load']:.1f} ({load_share:.2f})",
            )
        )
    print_table(f"KV copies on {device}, GB/s (share of a plain copy)", columns, rows, words=0)
    print(f"least share of a plain copy: {worst:.2f} (required: {_REQUIRED})")
    return int(args.assert_targets and worst < _REQUIRED)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
