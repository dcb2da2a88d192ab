"""`semsched bench run --device`: an emulated GPU in place of this machine's device."""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.compare import RunPlan
    from vllm_semantic_sched.lab.device.gpus import Gpu

_DEFAULTS: dict[str, Any] = {
    "blocks": 0,  # what the device's memory holds
    "block_size": 16,
    "prompts": "chat",
    "requests": 600,
    "overload": 1.75,
    "maxcon": 4,  # nearly Poisson
    "max_output": 1500,
    "mix": "rare",
    "quick": True,
}
"""Of options, where another load than that of a small model makes sense."""
_LONGEST = 16_384  # tokens of a sequence
_BUDGET = 2048  # tokens of a step
_CAPACITY_ROUNDS = 4  # requests per seat


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--device`."""
    options = {name: "" if value is True else f" {value}" for name, value in _DEFAULTS.items()}
    defaults = (f"{_option(name)}{value}" for name, value in options.items())
    parser.add_argument(
        "--device",
        metavar="NAME|FILE",
        help=(
            "an emulated GPU instead of this machine's device: a100, h100, h200, l4 or another "
            "of `semsched profile`, or the file of an engine profile. vLLM is real, step times "
            f"are those of the profile. Other defaults then: {', '.join(defaults)}, the seats of "
            "the GPU, and an 8B model without weights, which is written into the output folder"
        ),
    )


def prepare(args: argparse.Namespace) -> "Gpu":
    """Set the options that were not given to those of the device; the device. ValueError: an option
    that it cannot obey; PolicyError: no such device."""
    from vllm_semantic_sched.lab.device.gpus import find_gpu
    from vllm_semantic_sched.lab.device.model import make_shape

    if args.natural_ends or args.engines > 1:
        raise ValueError("--device: the device ends the answers, and has one engine")
    if args.model is None:
        args.model = _own_model(args)
        make_shape(args.model, tokenizer=True)
    gpu = find_gpu(args.device, args.model, args.output)
    given = {word.partition("=")[0] for word in args.words}
    for name, value in {**_DEFAULTS, "seats": gpu.seats, "profile": gpu.profile}.items():
        if _option(name) not in given:
            setattr(args, name, value)
    return gpu


def _own_model(args: argparse.Namespace) -> Path:
    return Path(args.output, "model")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def on_device(plan: "RunPlan", gpu: "Gpu", args: argparse.Namespace) -> "RunPlan":
    """The plan with servers on the device. If the load is to be a multiple of its capacity, that is
    found in virtual time, but for another model on the first server."""
    server = plan.server
    limits = ("--max-model-len", str(_LONGEST), "--max-num-batched-tokens", str(_BUDGET))
    device = {"profile": gpu.profile, **gpu.memory}
    server = replace(server, device=device, extra_args=(*limits, *server.extra_args))
    capacity = None
    if plan.overload is not None and args.model == _own_model(args):
        load = plan.workloads[0].config
        # A process of its own: this one is to send requests, without an engine's heap.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=_be_quiet) as pool:
            capacity = pool.submit(
                _capacity,
                prompts=load.prompts,
                requests=_CAPACITY_ROUNDS * server.seats,
                seed=load.seed,
                gpu=gpu,
                seats=server.seats,
            ).result()
    return replace(plan, server=server, capacity=capacity)


def _be_quiet() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _capacity(prompts: str, requests: int, seed: int, gpu: "Gpu", seats: int) -> float:
    """Output tokens per second that FCFS gives while all seats are taken."""
    from vllm_semantic_sched.lab.device.figures import capacity
    from vllm_semantic_sched.lab.device.load import LoadConfig, load_of
    from vllm_semantic_sched.lab.device.virtual import EngineConfig

    load = load_of(prompts, LoadConfig(requests, 1.0, seed))
    options: dict[str, Any] = {"kv_gib": None, "prefix_cache": True, **gpu.memory}
    options |= {"seats": seats, "budget": _BUDGET, "max_model_len": _LONGEST}
    config = EngineConfig("fcfs", "fcfs", profile=gpu.profile, **options)
    return capacity(load, config) * sum(request.answer for request in load) / len(load)
