"""Our scheduler on the path of vLLM's GPU users, without a GPU: CUDA platform, GPU worker, second
model runner, asynchronous scheduling and Triton attention, interpreted on the CPU.

Serves 17 requests under vLLM's scheduler, ours, and ours with KV swap, each in a process of its
own, and compares the answers, which must be equal. Needs nothing but this project's environment. It
shows that the parts fit together; kernels, graphs, streams and speed need a GPU
(`scripts/gpu_check.sh`).

example:
  python scripts/studies/cuda_path.py --output cuda-path
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pretended_cuda
from common import main

sys.path.append(str(Path(__file__).resolve().parents[1]))
from gpu.answers import SCHEDULERS
from gpu.checks import answers_section, problems_of, read_answers
from gpu.model import make_small_model

_KIND = "float32"
# Kernels that are not Triton's have a way in Python.
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 16 * 2**20,
    "compilation_config": {"custom_ops": ["none"]},
    "kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
}


def serve(output: Path, scheduler: str, model: Path, scale: float, seconds: float) -> None:
    """Serve the requests in a process in which the CPU passes for a GPU; CalledProcessError or
    TimeoutExpired, with the end of its log printed."""
    out = output / f"{scheduler}-{_KIND}.json"
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    command = [sys.executable, pretended_cuda.__file__, out, scheduler, model]
    command += ["--engine", json.dumps(_ENGINE), "--scale", str(scale)]
    here = Path(__file__).resolve()
    path = [str(here.parents[1]), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    fixed |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    with log.open("w") as file:
        try:
            subprocess.run(
                list(map(str, command)),
                check=True,
                timeout=seconds,
                env=os.environ | fixed,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        except subprocess.SubprocessError:
            print("\n".join(log.read_text().splitlines()[-20:]), file=sys.stderr)
            raise


def problems(answers: dict[str, Any], schedulers: list[str]) -> list[str]:
    """What is wrong: what every check of answers finds, or it was not the path of a GPU."""
    wrong = problems_of(answers)
    for name in schedulers:
        run = answers.get(_KIND, {}).get(name)
        if run is None:
            wrong.append(f"{name}: no answers")
        elif run["runner"] != 2 or not run["asynchronous"]:
            wrong.append(f"{name}: runner {run['runner']}, asynchronous: {run['asynchronous']}")
    return wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for answers and logs")
    add("--scheduler", nargs="+", default=list(SCHEDULERS), choices=SCHEDULERS)
    add(
        "--scale",
        type=float,
        default=0.06,
        help="of the requests' lengths; a step takes a second on two idle cores (%(default)s)",
    )
    add("--limit", type=float, default=900.0, help="seconds of a scheduler (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve with each scheduler; 1 if an answer differs."""
    model = args.output / "model"
    make_small_model(model, layers=2)
    for scheduler in args.scheduler:
        serve(args.output, scheduler, model, args.scale, args.limit)
    print(answers_section(args.output))
    wrong = problems(read_answers(args.output), args.scheduler)
    for problem in wrong:
        print(problem, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
