"""Measures a device that is not in devices.yaml: matrix products and memory copies with torch."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_semantic_sched.policy.profile.devices import Device
from vllm_semantic_sched.policy.profile.model_shape import ModelShape

if TYPE_CHECKING:
    import torch

_SECONDS = 0.1  # for each of the four parts of the benchmark
_TOKENS = 512  # of the matrix product
_LARGEST = 2**28  # bytes of the weights that are read
_COPIED = 2**26  # bytes
_NEEDED = 2**30  # bytes that must be free on an accelerator

# On a processor a step and a layer run as much Python as this many small torch operations. Guessed
# from the measured profiles of docs/measurements/engine-profiles.md.
_OPERATIONS = {"step": 1000, "layer": 50}


def measure_device(
    kind: str, name: str, dtype: str, model: ModelShape, memory: float = 1.0
) -> Device:
    """What torch reaches on this machine with matrices of this model. Raises RuntimeError if torch
    lacks the device, or too little of its memory is free.

    Args:
        kind, dtype: of the device, and of weights and activations, as torch names them.
        memory: GB of the device, for the result.
    """
    import torch

    kept = getattr(torch, dtype)
    if kind != "cpu":
        free, _ = torch.cuda.mem_get_info()
        if free < _NEEDED:
            raise RuntimeError("less than 1 GiB of its memory is free")
    # Work on a processor is done when torch returns.
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    linear = torch.nn.functional.linear

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Not zeros, whose memory may not exist yet.
        return torch.full((rows, columns), 0.01, device=kind, dtype=kept)

    with torch.inference_mode():
        tokens = matrix(_TOKENS, model.width)
        weight = matrix(model.inner, model.width)
        product = _fastest(lambda: linear(tokens, weight), wait)
        # Weights that fit into the processor's caches are read from there.
        size = min(model.weights, _LARGEST)
        rows = max(1, int(size / tokens.element_size() / model.width))
        token = matrix(1, model.width)
        weights = matrix(rows, model.width)
        reading = _fastest(lambda: linear(token, weights), wait)
        source = torch.ones(_COPIED, dtype=torch.uint8, pin_memory=kind != "cpu")
        target = torch.empty(_COPIED, dtype=torch.uint8, device=kind)
        copying = _fastest(lambda: target.copy_(source), wait)
        overhead: dict[str, float] = {}
        if kind == "cpu":  # elsewhere graphs replay the kernels of a step
            small = matrix(1, 8)
            seconds = _fastest(lambda: [small + small for _ in range(100)], wait) / 100
            overhead = {name: count * seconds for name, count in _OPERATIONS.items()}
    device = Device(
        name=name,
        bf16=2 * tokens.numel() * model.inner / product / 1e12,
        memory=memory,
        bandwidth=weights.numel() * weights.element_size() / reading / 1e9,
        host=_COPIED / copying / 1e9,
        measured=True,
    )
    return device.model_copy(update=overhead)


def _fastest(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Seconds of the fastest run, since other programs make runs slower and none faster."""

    def once() -> None:
        work()
        wait()

    timer = timeit.Timer(once)
    timer.timeit(1)
    end = time.perf_counter() + _SECONDS
    fastest = timer.timeit(1)
    while time.perf_counter() < end:
        fastest = min(fastest, timer.timeit(1))
    return fastest
