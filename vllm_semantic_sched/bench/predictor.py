"""`semsched bench predictor`: what a prediction costs, alone and beside a busy engine.

Latency of one text on one thread, throughput in full batches, size of the weights. With --engine
also the time of the engine's steps with and without prompts to predict, on a real `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench.console import make_table
from vllm_semantic_sched.bench.options import add_nice_argument
from vllm_semantic_sched.bench.server import ServerConfig, prefer_client

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_semantic_sched.bench.predictor_cost import Latency, Throughput
    from vllm_semantic_sched.bench.step_time import StepTimes
    from vllm_semantic_sched.bench.targets import Target

_WORDPIECES = (16, 64, 128)
_TARGET_WORDPIECES, _TARGET_THREADS = 64, 2
_MAX_LATENCY_MS, _MIN_RATE, _MAX_WEIGHTS_MB, _MAX_STEP_RATIO = 8.0, 250.0, 30.0, 1.10
_RESULTS = "predictor.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench predictor`."""
    add = parser.add_argument
    add("--output", type=Path, default=Path("bench-output"), help="folder of results (%(default)s)")
    add("--predictor", help="folder or hub id of another predictor than the shipped one")
    add("--repeats", type=int, default=300, help="timed predictions per length (%(default)s)")
    add("--seconds", type=float, default=5.0, help="of each throughput figure (%(default)s)")
    add("--engine", type=Path, metavar="MODEL", help="also measure step times, serving this model")
    add("--policy", default="ems", help="with --engine: a name or a YAML file (%(default)s)")
    add("--rate", type=int, default=50, help="with --engine: prompts per second (%(default)s)")
    add("--phase", type=float, default=10.0, help="with --engine: seconds a phase (%(default)s)")
    add("--cycles", type=int, default=3, help="with --engine: phases per condition (%(default)s)")
    add("--seats", type=int, default=16, help="with --engine: max_num_seqs (%(default)s)")
    add_nice_argument(parser)
    add("--assert-targets", action="store_true", help="fail if a target is missed")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write `predictor.json`; 1 if a target is missed that is asserted."""
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.predictor_cost import weights_bytes
    from vllm_semantic_sched.bench.report import print_problems, print_targets
    from vllm_semantic_sched.bench.results import environment
    from vllm_semantic_sched.bench.targets import missed

    if args.repeats < 1 or args.seconds <= 0:
        raise ValueError("--repeats must be at least 1, --seconds above 0")
    args.output.mkdir(parents=True, exist_ok=True)
    console = make_console()
    latencies, throughputs = _measure_cost(args)
    size = weights_bytes(args.predictor)
    _print_cost(console, latencies, throughputs, size)
    targets = cost_targets(latencies, throughputs, size)
    steps: Mapping[str, StepTimes] = {}
    if args.engine:
        steps = _measure_engine(args)
        _print_steps(console, steps, args.rate)
        targets.append(step_target(steps, args.rate))
    print_targets(console, targets)
    document = {
        "environment": environment(),
        "options": vars(args),
        "latency_seconds": [asdict(latency) for latency in latencies],
        "throughput": [asdict(throughput) for throughput in throughputs],
        "weights_bytes": size,
        "step_time_seconds": {condition: asdict(times) for condition, times in steps.items()},
        "targets": [{**asdict(target), "met": target.met} for target in targets],
    }
    path = args.output / _RESULTS
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
    console.print(f"figures: {path}", soft_wrap=True)
    return print_problems(console, missed(targets) if args.assert_targets else [])


def cost_targets(
    latencies: Iterable[Latency], throughputs: Iterable[Throughput], size: int | None
) -> list[Target]:
    """The targets on what was measured; `size` in bytes, None where there is no folder."""
    from vllm_semantic_sched.bench.targets import Target

    targets = [
        Target(
            f"one text of {latency.wordpieces} wordpieces on one thread, p50 in ms",
            1e3 * latency.p50,
            _MAX_LATENCY_MS,
            at_most=True,
        )
        for latency in latencies
        if latency.wordpieces == _TARGET_WORDPIECES
    ]
    targets += [
        Target(
            f"predictions per second in batches on {throughput.threads} threads",
            throughput.requests_per_second,
            _MIN_RATE,
        )
        for throughput in throughputs
        if throughput.threads == _TARGET_THREADS
    ]
    if size is not None:
        targets.append(Target("weights in MB", size / 1e6, _MAX_WEIGHTS_MB, at_most=True))
    return targets


def step_target(steps: Mapping[str, StepTimes], rate: int) -> Target:
    """The target on the engine's steps."""
    from vllm_semantic_sched.bench.targets import Target

    return Target(
        f"p99 step time, {rate} prompts/s: new / remembered ones",
        steps["new"].p99 / steps["known"].p99,
        _MAX_STEP_RATIO,
        at_most=True,
    )


def _measure_cost(args: argparse.Namespace) -> tuple[list[Latency], list[Throughput]]:
    from tqdm import tqdm

    from vllm_semantic_sched.bench.predictor_cost import (
        measure_latency,
        measure_throughput,
        thread_counts,
    )
    from vllm_semantic_sched.predict.model import TextPredictor

    throughputs = [
        measure_throughput(args.predictor, threads, args.seconds)
        for threads in tqdm(thread_counts(), desc="throughput", unit="thread count")
    ]
    predictor = TextPredictor.load(args.predictor, threads=1)
    latencies = [
        measure_latency(predictor, wordpieces, args.repeats)
        for wordpieces in tqdm(_WORDPIECES, desc="latency", unit="length")
    ]
    return latencies, throughputs


def _measure_engine(args: argparse.Namespace) -> dict[str, StepTimes]:
    from vllm_semantic_sched.bench.step_time import StepTimePlan, measure_step_times

    server = ServerConfig(
        model=args.engine,
        log=args.output / "server-predictor.log",
        seats=args.seats,
        num_blocks=None,  # KV for every stream: a preemption would look like a slow step
        nice=args.nice,
    )
    prefer_client(args.nice)
    plan = StepTimePlan(server, args.policy, args.rate, args.phase, args.cycles)
    return measure_step_times(plan, progress=True)


def _print_cost(
    console: Console,
    latencies: Sequence[Latency],
    throughputs: Sequence[Throughput],
    size: int | None,
) -> None:
    from vllm_semantic_sched.bench.predictor_cost import BATCH, BATCH_WORDPIECES

    table = make_table("one text at a time, one thread", "wordpieces", "p50, ms", "p99, ms")
    for latency in latencies:
        cells = (f"{1e3 * seconds:.2f}" for seconds in (latency.p50, latency.p99))
        table.add_row(str(latency.wordpieces), *cells)
    console.print(table)
    title = f"batches of {BATCH} texts of {BATCH_WORDPIECES} wordpieces"
    table = make_table(title, "threads", "predictions/s")
    for throughput in throughputs:
        table.add_row(str(throughput.threads), f"{throughput.requests_per_second:.0f}")
    console.print(table)
    if size is not None:
        console.print(f"weights and tokenizer: {size / 1e6:.1f} MB")


def _print_steps(console: Console, steps: Mapping[str, StepTimes], rate: int) -> None:
    titles = {
        "none": "no arrivals",
        "known": f"{rate} prompts/s, predictions remembered",
        "new": f"{rate} prompts/s, each predicted",
    }
    known = steps["known"]
    table = make_table(
        "time of a decode step, all seats busy", "beside it", "tokens", "p50, ms", "p99, ms",
        "p50 vs\nremembered", "p99 vs\nremembered", "predictor,\nshare of a core", "got a seat",
    )  # fmt: skip
    for condition, times in steps.items():
        share = times.predictor_share
        table.add_row(
            titles[condition],
            f"{times.tokens:,}",
            f"{1e3 * times.p50:.2f}",
            f"{1e3 * times.p99:.2f}",
            f"{times.p50 / known.p50:.2f}x",
            f"{times.p99 / known.p99:.2f}x",
            "-" if share is None else f"{share:.0%}",
            str(times.served),
        )
    console.print(table)
