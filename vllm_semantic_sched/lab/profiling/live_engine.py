"""Runs a vLLM engine in this process, and times its steps and its copies of KV blocks."""

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_semantic_sched.policy.profile.formula import Batch

# Between the two copies of a preempted request the engine computes a lot: the CPU cache holds
# neither side of a copy then. Writing this many bytes before each copy empties it.
_FLUSH_BYTES = 128 * 2**20


class BadOptions(ValueError):
    """vLLM rejects the engine options."""


@dataclass(frozen=True, slots=True)
class Step:
    """An engine step, from its scheduling to its output."""

    batch: Batch
    seconds: float


class Copies(NamedTuple):
    """Seconds of copies: a row per size, a column per repeat. Bytes over all layers and workers."""

    bytes_per_block: int
    save: list[list[float]]
    load: list[list[float]]


class LiveEngine:
    """vLLM's engine core, in this process and under vLLM's own scheduler, driven step by step with
    random prompts. `options` are those after `vllm serve` (BadOptions if vLLM rejects them).

    `token_budget` is the most tokens in a step, `kv_tokens` what fits into the KV cache.
    """

    def __init__(self, options: Sequence[str], seed: int = 0) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = _engine_arguments(options)
        # As the server does: some defaults depend on this.
        self._engine = LLMEngine.from_engine_args(arguments, UsageContext.OPENAI_API_SERVER)
        self._core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._config: Any = self._engine.vllm_config
        scheduler = self._core.scheduler
        limits = self._config.scheduler_config
        self.max_model_len = int(self._config.model_config.max_model_len)
        self.seats = int(limits.max_num_seqs)
        self.token_budget = int(limits.max_num_batched_tokens)
        self.block_size = int(scheduler.block_size)
        blocks = int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        self.kv_tokens = (blocks - 1) * self.block_size  # vLLM keeps one as its null block
        self._random = np.random.default_rng(seed)
        self._steps: list[Step] = []
        self._sequence = 0
        self._watch_steps()

    def describe(self) -> dict[str, Any]:
        """Versions and settings for the environment of an `EngineProfile`."""
        import torch
        import vllm

        model = self._config.model_config
        cache = self._config.cache_config
        bytes_per_block = self.copy([self.block_size], repeats=1).bytes_per_block
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": str(self._config.device_config.device_type),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_dtype": str(cache.cache_dtype),
            "block_size": self.block_size,
            "kv_bytes_per_token": bytes_per_block // self.block_size,
            "token_budget": self.token_budget,
            "max_model_len": self.max_model_len,
        }

    @property
    def model(self) -> str:
        """Name of the model; of a local model, the last part of its path."""
        name = str(self._config.model_config.model)
        return Path(name).name if Path(name).exists() else name

    @property
    def hardware(self) -> str:
        """The device, and how many of it; of a CPU engine, the processor and its cores."""
        if self._config.device_config.device_type == "cuda":
            import torch

            count = self._config.parallel_config.world_size
            name = torch.cuda.get_device_name()
            return name if count == 1 else f"{count} x {name}"
        return f"{processor()}, {os.cpu_count()} cores"

    def run(self, prompt_lengths: Sequence[int], output_tokens: int) -> list[Step]:
        """Serve random prompts of these lengths in one batch and return all engine steps."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        vocabulary = self._config.model_config.get_vocab_size()
        self._steps = []
        for length in prompt_lengths:
            tokens = self._random.integers(0, vocabulary, length).tolist()
            self._sequence += 1
            self._engine.add_request(str(self._sequence), {"prompt_token_ids": tokens}, params)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._steps

    def copy(self, tokens: Sequence[int], repeats: int, seed: int = 0) -> Copies:
        """Time copies of the KV of each number of tokens; of several workers the slowest counts."""
        blocks = [-(-count // self.block_size) for count in tokens]
        job: Any = time_copies
        workers: list[Copies] = self._engine.collective_rpc(job, args=(blocks, repeats, seed))
        return Copies(
            bytes_per_block=sum(copies.bytes_per_block for copies in workers),
            save=np.max([copies.save for copies in workers], axis=0).tolist(),
            load=np.max([copies.load for copies in workers], axis=0).tolist(),
        )

    def close(self) -> None:
        """Shut the engine down; it cannot be used again."""
        self._core.shutdown()

    def _watch_steps(self) -> None:
        from vllm_semantic_sched.engine.clock import StepClock, batch_of

        scheduler = self._core.scheduler
        clock = StepClock()
        schedule = scheduler.schedule
        update = scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic()
            output = schedule(*args, **kwargs)
            clock.scheduled(output, batch_of(output, scheduler.requests, scheduler.running), begin)
            return output

        def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            step = clock.finished(output, time.monotonic())
            if step is not None:
                batch, seconds = step
                if batch.sequences:
                    self._steps.append(Step(batch, seconds))
            result = update(output, *args, **kwargs)
            if not scheduler.requests:
                clock.idle()
            return result

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update


def time_copies(worker: Any, blocks: list[int], repeats: int, seed: int) -> Copies:
    """In the engine's worker, time saves of random KV blocks (`blocks`: how many at once) to host
    memory, by preemption's own backend, and loads into the same blocks; the cache of an idle engine
    is unchanged afterwards."""
    import torch

    from vllm_semantic_sched.engine.kv.block_copy import block_regions, make_backend

    runner = worker.model_runner
    regions = block_regions(runner.kv_caches, runner.kv_cache_config.num_blocks)
    backend = make_backend(regions, slots=max(blocks))
    device = regions[0].device
    flush = torch.zeros(_FLUSH_BYTES, dtype=torch.uint8) if device.type == "cpu" else None
    generator = torch.Generator().manual_seed(seed)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def timed(copy: Callable[[], None]) -> float:
        if flush is not None:
            flush.add_(1)
        synchronize()
        start = time.perf_counter()
        copy()
        synchronize()
        return time.perf_counter() - start

    save: list[list[float]] = [[] for _ in blocks]
    load: list[list[float]] = [[] for _ in blocks]
    # The first round is not counted: it touches host memory that is not mapped yet.
    for repeat in range(repeats + 1):
        for place, count in enumerate(blocks):
            order = torch.randperm(regions[0].shape[0] - 1, generator=generator)
            rows = (order[:count] + 1).tolist()  # not the null block
            slots = [range(count)]
            saved = timed(partial(backend.save, rows, slots))
            loaded = timed(partial(backend.load, rows, slots))
            if repeat:
                save[place].append(saved)
                load[place].append(loaded)
    return Copies(sum(region.shape[1] for region in regions), save, load)


def _engine_arguments(options: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = list(options)
    if given and not given[0].startswith("-"):
        given.insert(0, "--model")
    parser: Any = FlexibleArgumentParser(prog="vLLM", add_help=False)  # type: ignore[no-untyped-call]
    EngineArgs.add_cli_args(parser)
    if "--model" not in given:
        raise BadOptions("give a model after --")
    try:
        arguments = EngineArgs.from_cli_args(parser.parse_args(given))
    except (SystemExit, argparse.ArgumentError) as error:
        raise BadOptions(f"vLLM rejects these engine options: {' '.join(given)}") from error
    arguments.scheduler_cls = None
    arguments.kv_transfer_config = None
    arguments.disable_log_stats = True
    return arguments


def processor() -> str:
    """Name of the processor, as Linux has it; elsewhere what Python knows."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
