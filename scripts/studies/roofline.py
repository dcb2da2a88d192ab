"""Errors of derived profiles: beside Vidur's kernel timings, measured CPU profiles, and a real
engine's steps.

The timings, from the data folder (SEMSCHED_DATA), cover all kernels of a Llama layer but attention
on A100 and H100, by number of tokens and of tensor-parallel devices. Each is compared with the step
time by the derived profile less the fixed time of a step: of a decode batch up to 256 tokens, of a
prefill beyond. The CPU profiles are compared with profiles derived on this machine, by a benchmark
of half a second. Errors are derived / measured - 1.

With `--engine`, a vLLM engine serves a random model of this shape on the processor. After a minute
of more requests than seats, steps of 1, 2, 4 ... sequences are compared with the profile that the
engine started with, with the corrected one of that moment, and with the one that is in use before
each step. Give one shape per call.

OMP_NUM_THREADS=1 .venv/bin/python scripts/studies/roofline.py
OMP_NUM_THREADS=1 .venv/bin/python scripts/studies/roofline.py --engine 384,1024,4,6
"""

import argparse
import csv
import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from common import main

from vllm_semantic_sched.lab.bench.tiny_model import SIZES, TinyModelConfig, make_model
from vllm_semantic_sched.policy.profile.devices import Device, device_named
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile, load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline
from vllm_semantic_sched.sim.data_folder import data_root

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
    by_devices_and_tokens: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        tokens = int(row["num_tokens"])
        devices = int(row["num_tensor_parallel_workers"])
        bound = next(bound for bound in _BOUNDS if tokens <= bound)
        error = derived_seconds(row, device) / layer_seconds(row) - 1
        by_devices_and_tokens.setdefault((devices, bound), []).append(error)
    return by_devices_and_tokens


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
    shape = {**asdict(SIZES[size]), "vocab_size": _VOCABULARY}
    return ModelShape.from_config(size, shape, dtype="float32")


class Steps(NamedTuple):
    """Decode steps with their measured seconds, and the profiles that are compared with them.

    Attributes:
        derived, both_ends, corrected: profile at the start, after five steps of one sequence and
            five of all seats, and after the traffic.
        live: seconds of each step by the profile in use.
    """

    measured: Sequence[tuple[Batch, float]]
    live: Sequence[float]
    derived: EngineProfile
    both_ends: EngineProfile
    corrected: EngineProfile


def step_errors(steps: Steps) -> Iterator[tuple[int, float, list[float]]]:
    """Sequences, median measured seconds, and median absolute errors: of the derived and the
    corrected profile, and of the one in use."""
    for size in sorted({batch.sequences for batch, _ in steps.measured}):
        of_size = [
            (batch, seconds, live)
            for (batch, seconds), live in zip(steps.measured, steps.live, strict=True)
            if batch.sequences == size
        ]
        errors = [
            statistics.median(abs(steps.derived.step(batch) / s - 1) for batch, s, _ in of_size),
            statistics.median(abs(steps.corrected.step(batch) / s - 1) for batch, s, _ in of_size),
            statistics.median(abs(live / s - 1) for _, s, live in of_size),
        ]
        yield size, statistics.median(seconds for _, seconds, _ in of_size), errors


def growth(steps: Steps, profile: EngineProfile | None = None) -> float:
    """Median step with the most sequences by that with one: measured, or by a profile."""
    sizes = [batch.sequences for batch, _ in steps.measured]

    def median(size: int) -> float:
        return statistics.median(
            profile.step(batch) if profile else seconds
            for batch, seconds in steps.measured
            if batch.sequences == size
        )

    return median(max(sizes)) / median(min(sizes))


def _make_engine(config: TinyModelConfig, seats: int, folder: Path) -> Any:
    """vLLM's engine in this process, with our scheduler and a model of random weights."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM

    make_model(folder / "model", config)
    policy = folder / "policy.yaml"
    policy.write_text("predictor: {enabled: false}\n")
    return LLM(
        str(folder / "model"),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=seats,
        max_model_len=1024,
        gpu_memory_utilization=0.7,
        kv_cache_memory_bytes=2**28,
        num_gpu_blocks_override=544,
        block_size=32,
        scheduler_cls="vllm_semantic_sched.SemanticScheduler",
        additional_config={"semantic_sched": {"policy": str(policy)}},
    ).llm_engine


def measure_engine(config: TinyModelConfig, seats: int, seconds: float, folder: Path) -> Steps:
    """Serve more requests than seats for so long, then measure steps of each size."""
    engine = _make_engine(config, seats, folder)
    from vllm import SamplingParams

    estimates = engine.engine_core.engine_core.scheduler.core.estimates
    observed: list[tuple[Batch, float, float]] = []  # with seconds, taken and believed
    learn = estimates.observe_step
    rng = random.Random(0)
    seen = Counter[int]()
    derived = estimates.profile
    both_ends = None

    def observe(batch: Batch, took: float) -> None:
        nonlocal both_ends
        believed = estimates.profile.step(batch)
        learn(batch, took)
        if not batch.prefills:
            observed.append((batch, took, believed))
            seen[batch.sequences] += 1
            if both_ends is None and min(seen[1], seen[seats]) >= 5:
                both_ends = estimates.profile

    estimates.observe_step = observe
    numbers = itertools.count()

    def add(prompt: int, output: int) -> None:
        tokens = [rng.randrange(3, _VOCABULARY) for _ in range(prompt)]
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        engine.add_request(str(next(numbers)), {"prompt_token_ids": tokens}, params)

    def finish() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    add(20, 20)  # what a client sends to see whether the server works
    finish()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        while engine.get_num_unfinished_requests() < seats + 4:
            add(rng.randint(16, 300), rng.randint(30, 200))
        engine.step()
    corrected = estimates.profile
    finish()
    observed.clear()
    sizes = [min(2**power, seats) for power in range(seats.bit_length())]
    for _ in range(3):  # in turn, because the machine's speed drifts
        for size in sizes:
            for _ in range(size):
                add(rng.randint(100, 250), 25)
            finish()
    assert both_ends is not None
    kept = [row for row in observed if row[0].sequences in sizes]
    return Steps(
        measured=[(batch, took) for batch, took, _ in kept],
        live=[believed for _, _, believed in kept],
        derived=derived,
        both_ends=both_ends,
        corrected=corrected,
    )


def _print_engine(args: argparse.Namespace) -> int:
    hidden, inner, layers, heads = (int(number) for number in args.engine.split(","))
    config = TinyModelConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(2, heads),
    )
    with TemporaryDirectory() as folder:
        steps = measure_engine(config, args.seats, args.seconds, Path(folder))
    print("\n| sequences | measured ms | error at the start | after the traffic | in use |")
    print("|---|---|---|---|---|")
    for size, seconds, errors in step_errors(steps):
        print(f"| {size} | {seconds * 1e3:.2f} |", " | ".join(f"{e:.1%}" for e in errors), "|")
    measured = growth(steps)
    print(f"\nstep({args.seats}) / step(1): measured {measured:.2f}", end="")
    for name, profile in (
        ("at the start", steps.derived),
        ("after five steps of both", steps.both_ends),
        ("after the traffic", steps.corrected),
    ):
        ratio = growth(steps, profile)
        print(f", {name} {ratio:.2f} ({ratio / measured - 1:+.0%})", end="")
    print()
    return 0


def _print_timings(path: Path, device: Device) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        errors_by_group = errors(csv.DictReader(file), device)
    counts = sorted({devices for devices, _ in errors_by_group})
    bounds = sorted({bound for _, bound in errors_by_group})
    print(f"\n{path.stem}: median (worst) by tokens and number of devices\n")
    print("| tokens |", " | ".join(map(str, counts)), "|")
    print("|---|" + "---|" * len(counts))
    below = 0
    for bound in bounds:
        label = f"{below + 1:,}" if bound == below + 1 else f"{below + 1:,} to {bound:,}"
        label = f"over {below:,}" if bound == _BOUNDS[-1] else label
        cells = (_cell(errors_by_group[devices, bound]) for devices in counts)
        print(f"| {label} |", " | ".join(cells), "|")
        below = bound


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.0%} ({max(values, key=abs):+.0%})"


def _run(args: argparse.Namespace) -> int:
    if args.engine is not None:
        return _print_engine(args)
    from vllm_semantic_sched.engine.startup.device_benchmark import measure_device

    root = args.data or data_root()
    if root is None:
        raise FileNotFoundError("no data folder: pass --data DIR or set SEMSCHED_DATA")
    for path in sorted((root / "vidur").glob("mlp_*.csv")):
        _print_timings(path, device_named(path.stem.split("_")[1]))
    for size in SIZES:
        model = tiny_shape(size)
        measured = load_profile(f"cpu-2core-{size}")
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
    parser.add_argument("--engine", help="hidden size, inner size, layers, heads: 384,1024,4,6")
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic")


if __name__ == "__main__":
    main(__doc__, _add_arguments, _run)
