"""Options that the commands which compare schedulers on a real server have in common."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench.load import WorkloadConfig, parse_mix
from vllm_semantic_sched.bench.server import ServerConfig

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.compare import RunPlan
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec


def add_plan_arguments(
    parser: argparse.ArgumentParser, requests: int, max_burst: int, overload: float
) -> None:
    """Declare server, load and policy; the arguments are defaults."""
    load = WorkloadConfig()
    add_server_arguments(parser)
    add = parser.add_argument
    add("--policy", default="ems", help="of the semantic schedulers: a name or a YAML file")
    add("--requests", type=int, default=requests, help="per mix (default: %(default)s)")
    add(
        "--overload",
        type=float,
        default=overload,
        help="offered load over the first scheduler's measured capacity (%(default)s)",
    )
    add("--gap", type=float, help="seconds between bursts, instead of --overload")
    add("--maxcon", type=int, default=max_burst, help="largest burst (%(default)s)")
    add("--seed", type=int, default=load.seed, help="of the workload (%(default)s)")
    add(
        "--max-output",
        type=int,
        default=load.max_output_tokens,
        help="longer answers are cut to this many tokens (%(default)s)",
    )
    add(
        "--rounds",
        type=int,
        default=1,
        help="run every scheduler so many times, in reversed order every second time, and pool "
        "the records: use 2 or more where the machine's speed drifts (%(default)s)",
    )


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare model, output folder and shape of the server."""
    shape = ServerConfig(Path(), Path())
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for results, pictures and logs")
    add("--seats", type=int, default=shape.seats, help="max_num_seqs (%(default)s)")
    add("--blocks", type=int, default=shape.num_blocks, help="KV blocks; 0: vLLM's choice")
    add("--block-size", type=int, default=shape.block_size, help="tokens a block (%(default)s)")
    add("--stream-interval", type=int, default=shape.stream_interval, help="tokens per message")
    add_nice_argument(parser)
    add("--server-args", default="", help="more arguments of vllm serve, one quoted string")
    add("--quiet", action="store_true", help="no progress bars")


def add_nice_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --nice."""
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="process priority of servers and client; below 0, for figures that other programs "
        "disturb less, needs root",
    )


def make_server(args: argparse.Namespace) -> ServerConfig:
    """The server that the options describe."""
    return ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=args.seats,
        num_blocks=args.blocks or None,
        block_size=args.block_size,
        stream_interval=args.stream_interval,
        nice=args.nice,
        extra_args=tuple(shlex.split(args.server_args)),
    )


def make_plan(
    args: argparse.Namespace, schedulers: Sequence[SchedulerSpec], mixes: Sequence[str]
) -> RunPlan:
    """The plan that the options describe.

    Raises:
        ValueError: an option has an impossible value.
        FileNotFoundError: there is no such model folder.
    """
    from vllm_semantic_sched.bench.compare import RunPlan, end_token
    from vllm_semantic_sched.bench.workload import make_workload

    for mix in mixes:
        parse_mix(mix)
    load = WorkloadConfig(
        requests=args.requests,
        gap=args.gap or 0.0,
        max_burst=args.maxcon,
        seed=args.seed,
        max_output_tokens=args.max_output,
    )
    return RunPlan(
        server=make_server(args),
        schedulers=schedulers,
        workloads=[make_workload(replace(load, mix=mix)) for mix in mixes],
        output=args.output,
        overload=None if args.gap else args.overload,
        eos_token=end_token(args.model),
        rounds=args.rounds,
    )
