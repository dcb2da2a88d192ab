"""Errors of derived profiles: beside Vidur's kernel timings, and beside measured CPU profiles.

The timings, from the data folder (SEMSCHED_DATA), cover all kernels of a Llama layer but attention
on A100 and H100, by number of tokens and of tensor-parallel devices. Each is compared with the step
time by the derived profile less the fixed time of a step: of a decode batch up to 256 tokens, of a
prefill beyond. The CPU profiles are compared with profiles derived on this machine, by a benchmark
of two seconds. Errors are derived / measured - 1.

OMP_NUM_THREADS=1 .venv/bin/python scripts/studies/roofline.py
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from common import main

from vllm_semantic_sched.bench.tiny_model import SIZES
from vllm_semantic_sched.datasets import data_root
from vllm_semantic_sched.policy.estimates.roofline import (
    Device,
    ModelShape,
    Roofline,
    device_named,
)
from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile, load_profile

# Kernels of a layer, and how often each of them runs.
_KERNELS = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}
_LARGEST_DECODE = 256
_BOUNDS = (1, 32, 128, 256, 512, 1024, 4096, 1 << 20)  # largest number of tokens of each row
_VOCABULARY = 32768  # of the benchmark's models

Row = Mapping[str, str]


def layer_seconds(row: Row) -> float:
    """The measured time of a layer without attention. The file has milliseconds."""
    kernels = _KERNELS.items()
    return sum(count * float(row[f"time_stats.{name}.median"]) for name, count in kernels) / 1e3


def derived_seconds(row: Row, device: Device) -> float:
    """The time of that layer by the derived profile."""
    config = {
        "hidden_size": row["n_embd"],
        "num_hidden_layers": 1,
        "num_attention_heads": row["n_head"],
        "num_key_value_heads": row["n_kv_head"],
        "intermediate_size": row["n_expanded_embd"],
        "vocab_size": 0,  # the output projection is not part of a layer
    }
    model = ModelShape.from_config("layer", config, dtype="float16")
    layer = device.model_copy(update={"step": 0.0})
    terms = Roofline(model, layer, int(row["num_tensor_parallel_workers"])).profile()
    tokens = int(row["num_tokens"])
    if tokens <= _LARGEST_DECODE:
        return terms.step(Batch(decodes=tokens))
    return terms.batch_terms.step + terms.alpha2 * tokens


def errors(rows: Iterable[Row], device: Device) -> dict[tuple[int, int], list[float]]:
    """Relative errors by number of devices and row of the table."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        tokens, devices = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        bound = next(bound for bound in _BOUNDS if tokens <= bound)
        error = derived_seconds(row, device) / layer_seconds(row) - 1
        found.setdefault((devices, bound), []).append(error)
    return found


def cpu_errors(derived: EngineProfile, measured: EngineProfile) -> Iterator[tuple[str, float]]:
    """Relative errors of prefills, decode steps and copies within the measured range."""
    assert measured.ranges is not None
    longest = measured.ranges.prefill_tokens[1]
    for tokens in (64, 512, 1023, 4096, 8192):
        if tokens <= longest:
            seconds = derived.prefill_alone(tokens, 2048) / measured.prefill_alone(tokens, 2048)
            yield f"prefill of {tokens:,} tokens", seconds - 1
    for decodes in (1, 4, 16):
        batch = Batch(decodes=decodes, context=500 * decodes)
        yield f"decode, batch of {decodes}", derived.step(batch) / measured.step(batch) - 1
    yield "load of 1,000 tokens", derived.load(1000) / measured.load(1000) - 1


def tiny_shape(size: str) -> ModelShape:
    """The shape of a model of `semsched bench make-model`."""
    config = SIZES[size]
    shape = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": _VOCABULARY,
    }
    return ModelShape.from_config(size, shape, dtype="float32")


def _print_timings(path: Path, device: Device) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        found = errors(csv.DictReader(file), device)
    counts = sorted({devices for devices, _ in found})
    bounds = sorted({bound for _, bound in found})
    print(f"\n{path.stem}: median (worst) by tokens and number of devices\n")
    print("| tokens |", " | ".join(map(str, counts)), "|")
    print("|---|" + "---|" * len(counts))
    below = 0
    for bound in bounds:
        label = f"{below + 1:,}" if bound == below + 1 else f"{below + 1:,} to {bound:,}"
        label = f"over {below:,}" if bound == _BOUNDS[-1] else label
        cells = (_cell(found[devices, bound]) for devices in counts)
        print(f"| {label} |", " | ".join(cells), "|")
        below = bound


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.0%} ({max(values, key=abs):+.0%})"


def _run(args: argparse.Namespace) -> int:
    from vllm_semantic_sched.engine.device_benchmark import measure_device

    root = args.data or data_root()
    if root is None:
        raise FileNotFoundError("no data folder: pass --data DIR or set SEMSCHED_DATA")
    for path in sorted((root / "vidur").glob("mlp_*.csv")):
        _print_timings(path, device_named(path.stem.split("_")[1]))
    for size in SIZES:
        model, measured = tiny_shape(size), load_profile(f"cpu-2core-{size}")
        device = measure_device("cpu", "this processor", "float32", model)
        print(
            f"\n{size}: {device.bf16 * 1e3:.0f} GFLOP/s, reads {device.bandwidth:.1f} GB/s, copies "
            f"{device.host:.1f} GB/s, step {device.step * 1e3:.2f} ms, layer "
            f"{device.layer * 1e3:.3f} ms\n"
        )
        for name, error in cpu_errors(Roofline(model, device).profile(), measured):
            print(f"| {name} | {error:+.0%} |")
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="data folder (default: SEMSCHED_DATA)")


if __name__ == "__main__":
    main(__doc__, _add_arguments, _run)
