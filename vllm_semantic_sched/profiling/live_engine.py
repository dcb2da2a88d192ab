"""A vLLM engine inside this process, with a clock on its steps."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_semantic_sched.policy.estimates.batch import Batch
from vllm_semantic_sched.profiling.copies import Copies, time_copies


class BadOptions(ValueError):
    """vLLM does not take these options."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: what was in it and its seconds."""

    batch: Batch
    seconds: float


class LiveEngine:
    """vLLM's engine core, driven step by step with random prompts.

    The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), under vLLM's own
    scheduler: what is measured is the engine and no policy. Everything else is as given.

    Args:
        options: as after `vllm serve`: a model, then engine options.

    Raises:
        BadOptions: vLLM refuses the options.
    """

    def __init__(self, options: Sequence[str], seed: int = 0) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = _engine_arguments(options)
        # As the server would: some defaults depend on it.
        self._engine = LLMEngine.from_engine_args(arguments, UsageContext.OPENAI_API_SERVER)
        self._core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._config: Any = self._engine.vllm_config
        self._random = np.random.default_rng(seed)
        self._steps: list[Step] = []
        self._sequence = 0
        self._watch_steps()

    # What it is

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return int(self._config.model_config.max_model_len)

    @property
    def seats(self) -> int:
        """Sequences in a step at most."""
        return int(self._config.scheduler_config.max_num_seqs)

    @property
    def token_budget(self) -> int:
        """Tokens in a step at most."""
        return int(self._config.scheduler_config.max_num_batched_tokens)

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return int(self._core.scheduler.block_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        blocks = int(self._core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
        return (blocks - 1) * self.block_size  # one is vLLM's null block

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that a token takes, on all layers and workers."""
        return self.copy([self.block_size], repeats=1).bytes_per_block // self.block_size

    def describe(self) -> dict[str, Any]:
        """Fields of `policy.estimates.profile.Environment` that the engine knows."""
        import torch
        import vllm

        model, cache = self._config.model_config, self._config.cache_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": str(self._config.device_config.device_type),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_dtype": str(cache.cache_dtype),
            "block_size": self.block_size,
            "token_budget": self.token_budget,
            "max_model_len": self.max_model_len,
        }

    @property
    def model(self) -> str:
        """The model's name, a folder's without what is above it."""
        name = str(self._config.model_config.model)
        return Path(name).name if Path(name).exists() else name

    @property
    def hardware(self) -> str:
        """The device in words."""
        if self._config.device_config.device_type == "cuda":
            import torch

            count = self._config.parallel_config.world_size
            name = torch.cuda.get_device_name()
            return name if count == 1 else f"{count} x {name}"
        return f"{_processor()}, {os.cpu_count()} cores"

    # What it does

    def run(self, prompt_lengths: Sequence[int], output_tokens: int) -> list[Step]:
        """Serve random prompts of these lengths together, each to that many output tokens."""
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
        """Save and load the KV of so many tokens, see `copies.time_copies`."""
        blocks = [-(-count // self.block_size) for count in tokens]
        # The slowest worker's, where several hold a part of each token's KV.
        job: Any = time_copies
        found: list[Copies] = self._engine.collective_rpc(job, args=(blocks, repeats, seed))
        return Copies(
            bytes_per_block=sum(part.bytes_per_block for part in found),
            save=np.max([part.save for part in found], axis=0).tolist(),
            load=np.max([part.load for part in found], axis=0).tolist(),
        )

    def close(self) -> None:
        """Give the memory back."""
        self._core.shutdown()

    def _watch_steps(self) -> None:
        from vllm_semantic_sched.engine.clock import StepClock, batch_of

        scheduler, clock = self._core.scheduler, StepClock()
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            batch = batch_of(output, scheduler.requests)
            clock.scheduled(output, batch, time.perf_counter())
            return output

        def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            step = clock.finished(output, time.perf_counter())
            if step is not None and step[0].sequences:
                self._steps.append(Step(*step))
            return update(output, *args, **kwargs)

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update


@contextlib.contextmanager
def live_engine(options: Sequence[str], seed: int = 0) -> Iterator[LiveEngine]:
    """A LiveEngine that is shut down at the end."""
    engine = LiveEngine(options, seed)
    try:
        yield engine
    finally:
        engine.close()


def _engine_arguments(options: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = list(options)
    if given and not given[0].startswith("-"):
        given.insert(0, "--model")
    parser: Any = FlexibleArgumentParser(prog="vLLM", add_help=False)  # type: ignore[no-untyped-call]
    EngineArgs.add_cli_args(parser)
    if "--model" not in given:
        raise BadOptions("name a model after --")
    try:
        arguments = EngineArgs.from_cli_args(parser.parse_args(given))
    except (SystemExit, argparse.ArgumentError) as error:
        raise BadOptions(f"vLLM does not take these engine options: {' '.join(given)}") from error
    arguments.scheduler_cls = None
    arguments.kv_transfer_config = None
    arguments.disable_log_stats = True
    return arguments


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
