"""Makes vLLM's CUDA platform compute on the CPU: its device, worker, second model runner and Triton
attention run as on a GPU, Triton interpreting the kernels. For `cuda_path.py`.

What stays unproven: compiled kernels, FlashAttention, CUDA graphs, streams and speed.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from types import CodeType
from typing import Any

# By module of vLLM 0.32: what is replaced in its source.
EDITS = {
    "vllm.platforms": [
        # The version of a build for CPUs ends in "cpu", which switches the platform off.
        ("return substr in vllm_version", "return False"),
    ],
    "vllm.platforms.cuda": [
        ('    device_type: str = "cuda"', '    device_type: str = "cpu"'),
        ('    dist_backend: str = "nccl"', '    dist_backend: str = "gloo"'),
        ('dispatch_key: str = "CUDA"', 'dispatch_key: str = "CPU"'),
    ],
    "vllm.v1.worker.gpu_worker": [
        (
            'self.device = torch.device(f"cuda:{visible_device_index}")',
            'self.device = torch.device("cpu")',
        ),
        ("torch.accelerator.set_device_index(self.device)", "pass"),
        ('if self.device_config.device_type == "cuda":', "if True:"),
        # It imports models that need packages which this project does not.
        ("        kernel_warmup(self)", "        pass"),
    ],
    "vllm.utils.torch_utils": [
        ("return torch.ops._C.get_cuda_view_from_cpu_tensor(cpu_tensor)", "return cpu_tensor"),
    ],
}
# What is added to a module's end.
ADDED = {
    "vllm.third_party.pynvml": """
from types import SimpleNamespace as _Names
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = lambda which: 0
nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"
nvmlDeviceGetUUID = lambda handle: "GPU-0"
nvmlDeviceGetMemoryInfo = lambda handle: _Names(total=80 << 30, free=79 << 30, used=1 << 30)
nvmlSystemGetDriverVersion = lambda: "580.0"
""",
}
# Extensions that vLLM imports unguarded.
_EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
_ASKED_AT_IMPORT = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
)
_MEMORY = 80 * 2**30
_kept: list[Any] = []  # libraries, whose operators would go with them


class StaleEdit(ImportError):
    """vLLM's source is not the one that the edits were written for."""


def edit(name: str, source: str) -> str:
    """A module's source with its edits; StaleEdit if one does not apply."""
    for old, new in EDITS.get(name, ()):
        if old not in source:
            raise StaleEdit(f"{name} of this vLLM does not have: {old}")
        source = source.replace(old, new)
    return source + ADDED.get(name, "")


class _EditedSource(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source = edit(fullname, self.get_source(fullname))
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in EDITS and fullname not in ADDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _EditedSource(fullname, spec.origin)
        return spec


class _Stream:
    """A stream, or an event on one: all work is done when it is queued."""

    device = property(lambda self: _torch().device("cpu"))
    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def _nothing(self, *args: Any) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = _nothing


def _torch() -> Any:
    import torch

    return torch


def pretend() -> None:
    """Prepare this process; before vLLM is imported."""
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already")
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    import triton.backends.nvidia.driver as driver

    driver.CudaDriver.is_active = staticmethod(lambda: True)
    sys.meta_path.insert(0, _Finder())
    for name in _EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    torch = _torch()
    _pretend_devices(torch)
    _pretend_memory(torch)
    _answer_questions(torch)


def _pretend_devices(torch: Any) -> None:
    current = _Stream()
    properties = types.SimpleNamespace(
        total_memory=_MEMORY,
        multi_processor_count=132,
        name="pretended",
        is_integrated=False,
        gcnArchName="",
        L2_cache_size=50 << 20,
        major=9,
        minor=0,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
        uuid="pretended",
    )
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Stream
    for place in (torch.accelerator, torch.cuda):
        place.current_stream = lambda *args: current
        place.synchronize = place.empty_cache = place.empty_host_cache = lambda *args: None
        place.set_stream = lambda *args: None
    torch.cuda.stream = lambda stream: stream or current
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *args: properties
    torch.cuda._sleep = lambda *args: None
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.set_device_index = lambda *args: None
    torch.accelerator.current_device_index = lambda: 0


def _pretend_memory(torch: Any) -> None:
    free = (_MEMORY // 2, _MEMORY)
    torch.accelerator.get_memory_info = torch.cuda.mem_get_info = lambda *args: free
    for place in (torch.accelerator, torch.cuda):
        place.memory_stats = lambda *args: {}
        place.reset_peak_memory_stats = lambda *args: None
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
            setattr(place, name, lambda *args: 0)
    torch.cuda.memory.get_allocator_backend = lambda: "pretended"
    # Pinned memory needs a driver.
    for name in (
        "empty",
        "zeros",
        "ones",
        "full",
        "tensor",
        "arange",
        "rand",
        "randn",
        "empty_like",
        "zeros_like",
        "empty_strided",
    ):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.Tensor.is_pinned = lambda self, *args: True
    torch.Tensor.record_stream = lambda self, *args: None


def _unpinned(make: Any) -> Any:
    def make_unpinned(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return make_unpinned


def _answer_questions(torch: Any) -> None:
    """Define what vLLM asks its extension while it is imported; all else has a way in Python."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name in _ASKED_AT_IMPORT:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")

    def silu_and_mul(out: Any, gate_and_up: Any) -> None:
        gate, up = gate_and_up.chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
    library.impl("silu_and_mul", silu_and_mul, "CompositeExplicitAutograd")
    _kept.append(library)


if __name__ == "__main__":
    pretend()
    from gpu.answers import main

    main()
