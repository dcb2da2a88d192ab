"""Cost of a prediction, alone and beside a busy engine.

Measures the latency of one text on one thread, the throughput in full batches and the size of the
weights, and simulates what that throughput means at the pace of a GPU (configs/scenarios/
reading.yaml); with --engine also the time of the engine's steps with and without prompts to
predict, on a real `vllm serve`. Prints tables and writes `predictor.json`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import Target, main, missed, percentiles, print_targets, write_json
from step_time import StepTimePlan, StepTimes, measure_step_times

from vllm_semantic_sched.cli.console import make_console, print_table
from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.lab.bench.command_line import add_nice_argument, print_problems
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.server import ServerConfig, prefer_client
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.predict.model import SHIPPED_WEIGHTS, TextPredictor
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.scenario import load_scenarios
from vllm_semantic_sched.sim.simulation import simulate

if TYPE_CHECKING:
    from rich.console import Console

_WORDPIECES = (16, 64, 128)
_TARGET_WORDPIECES = 64
_TARGET_THREADS = 2
_MAX_LATENCY_MS = 8.0
_MIN_RATE = 250.0
_MAX_STEP_RATIO = 1.10
_MAX_WEIGHTS_MB = 60.0  # 45 for one network; the second one has 22
BATCH = 16
"""Texts in a batch of the throughput measurement; the policy's default `max_batch`."""
BATCH_WORDPIECES = 64
"""Wordpieces of each text in a batch."""

# Each word is one wordpiece, so that a text can have any length.
_SENTENCE = (
    "my father is old and since this morning he has had a heavy feeling in his heart he looks "
    "very white and says his left arm is strange it would take us an hour to drive to the "
    "hospital what should i do first"
)
_FRAME = 2  # [CLS] and [SEP]
_WARM_UP = 5
_IN_TIME = 0.3  # seconds


@dataclass(frozen=True)
class Latency:
    """Seconds from text to prediction, one text at a time on one thread."""

    wordpieces: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Pace:
    """A simulated load with a predictor of this speed; None: clients state the levels."""

    texts_per_second: float | None
    in_time: float  # share of texts read before their request starts, or within `_IN_TIME`
    ttft_p99: float  # of level 0, seconds


@dataclass(frozen=True)
class Throughput:
    """Predictions per second in batches of `BATCH`, in one process with `threads` threads."""

    threads: int
    requests_per_second: float


def text_of(wordpieces: int) -> str:
    """Return a text with this number of wordpieces, including [CLS] and [SEP], for the shipped
    predictor, and about as many for another one."""
    return " ".join(itertools.islice(itertools.cycle(_SENTENCE.split()), wordpieces - _FRAME))


def measure_latency(predictor: TextPredictor, wordpieces: int, repeats: int) -> Latency:
    """Predict one text `repeats` times and time each."""
    text = text_of(wordpieces)
    seconds = []
    for repeat in range(_WARM_UP + repeats):
        started = time.perf_counter()
        predictor.predict([text])
        if repeat >= _WARM_UP:
            seconds.append(time.perf_counter() - started)
    return Latency(wordpieces, *percentiles(seconds))


def measure_throughput(path: str | None, threads: int, seconds: float) -> Throughput:
    """Predict full batches for at least `seconds`. Loading the predictor also sets the thread count
    of this process."""
    predictor = TextPredictor.load(path, threads=threads)
    texts = [text_of(BATCH_WORDPIECES)] * BATCH
    predictor.predict(texts)
    batches = 0
    started = time.perf_counter()
    elapsed = 0.0
    while not batches or elapsed < seconds:
        predictor.predict(texts)
        batches += 1
        elapsed = time.perf_counter() - started
    return Throughput(threads, batches * BATCH / elapsed)


def simulate_pace(texts_per_second: float | None, requests: int) -> Pace:
    """Simulate configs/scenarios/reading.yaml with this number of requests."""
    changes = {
        "sweep": [],
        "workload.requests": requests,
        "workload.hints": texts_per_second is None,
        "predictor.latency_per_request": 1 / (texts_per_second or math.inf),
    }
    [scenario] = load_scenarios("reading", changes)
    runs = simulate(scenario, "ems").runs
    first_tokens = [
        run.first_token - run.request.arrival
        for run in runs
        if run.request.level == 0 and run.first_token is not None
    ]
    in_time = sum(map(_is_read_in_time, runs)) / len(runs)
    return Pace(texts_per_second, in_time, percentiles(first_tokens)[1])


def _is_read_in_time(run: Run) -> bool:
    read = run.job.read_at
    if read is None:
        return False
    started = math.inf if run.started is None else run.started
    return read <= max(run.request.arrival + _IN_TIME, started)


def thread_counts() -> list[int]:
    """Return 1, 2 and the number of cores that this process may use, without duplicates."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, min(2, cores), cores})


def weights_bytes(path: str | None) -> int | None:
    """Return the size of all files in the predictor's folder; None for a hub id."""
    folder = SHIPPED_WEIGHTS if path is None else Path(path)
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cost_targets(
    latencies: Iterable[Latency], throughputs: Iterable[Throughput], size: int | None
) -> list[Target]:
    """Return the targets with their measured values; `size` in bytes, None if it is unknown."""
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
    """Return the target for the engine's steps."""
    return Target(
        f"p99 step time, {rate} prompts/s: new / remembered ones",
        steps["new"].p99 / steps["known"].p99,
        _MAX_STEP_RATIO,
        at_most=True,
    )


def _measure_cost(args: argparse.Namespace) -> tuple[list[Latency], list[Throughput]]:
    progress = Progress(shown=True)
    progress.message("measuring throughput and latency")
    throughputs = [
        measure_throughput(args.predictor, threads, args.seconds) for threads in thread_counts()
    ]
    predictor = TextPredictor.load(args.predictor, threads=1)
    latencies = [measure_latency(predictor, count, args.repeats) for count in _WORDPIECES]
    return latencies, throughputs


def _simulate_paces(throughputs: Sequence[Throughput], requests: int) -> list[Pace]:
    Progress(shown=True).message("simulating a GPU's pace")
    speeds = [throughput.requests_per_second for throughput in throughputs]
    return [simulate_pace(speed, requests) for speed in (None, *speeds)]


def _measure_engine(args: argparse.Namespace) -> dict[str, StepTimes]:
    server = ServerConfig(
        model=args.engine,
        log=args.output / "server-predictor.log",
        seats=args.seats,
        num_blocks=None,  # enough KV for every stream: a preemption would look like a slow step
        nice=args.nice,
    )
    prefer_client(args.nice)
    plan = StepTimePlan(server, args.policy, args.rate, args.phase, args.cycles)
    return measure_step_times(plan, Progress(shown=True))


def _print_cost(
    console: Console,
    latencies: Sequence[Latency],
    throughputs: Sequence[Throughput],
    size: int | None,
) -> None:
    print_table(
        "one text at a time, one thread",
        ("wordpieces", "p50, ms", "p99, ms"),
        (
            (latency.wordpieces, f"{1e3 * latency.p50:.2f}", f"{1e3 * latency.p99:.2f}")
            for latency in latencies
        ),
    )
    print_table(
        f"batches of {BATCH} texts of {BATCH_WORDPIECES} wordpieces",
        ("threads", "predictions/s"),
        (
            (throughput.threads, f"{throughput.requests_per_second:.0f}")
            for throughput in throughputs
        ),
    )
    if size is not None:
        console.print(f"weights and tokenizer: {size / 1e6:.1f} MB")


def _print_paces(paces: Sequence[Pace]) -> None:
    stated = paces[0].ttft_p99
    rows = []
    for pace in paces:
        read = ("hints", "-", "-")
        if pace.texts_per_second is not None:
            read = ("text", f"{pace.texts_per_second:.0f}", f"{pace.in_time:.1%}")
        rows.append((*read, f"{pace.ttft_p99:.2f}", f"{pace.ttft_p99 / stated:.2f}x"))
    print_table(
        "simulated: 55 requests/s on an H100, the level from",
        (
            "",
            "texts/s",
            f"read before the start or in {_IN_TIME:g} s",
            "level 0: TTFT p99, s",
            "against hints",
        ),
        rows,
    )


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--output", type=Path, default=Path("bench-output"), help="folder of results (%(default)s)")
    add("--predictor", help="folder or hub id of another predictor than the shipped one")
    add("--repeats", type=int, default=300, help="timed predictions per length (%(default)s)")
    add("--seconds", type=float, default=5.0, help="of each throughput figure (%(default)s)")
    add("--requests", type=int, default=6000, help="simulated at a GPU's pace (%(default)s)")
    add("--engine", type=Path, metavar="MODEL", help="also measure step times, serving this model")
    add("--policy", default="ems", help="with --engine: a name or a YAML file (%(default)s)")
    add("--rate", type=int, default=50, help="with --engine: prompts per second (%(default)s)")
    add("--phase", type=float, default=10.0, help="with --engine: seconds a phase (%(default)s)")
    add("--cycles", type=int, default=3, help="with --engine: phases per condition (%(default)s)")
    add("--seats", type=int, default=16, help="with --engine: max_num_seqs (%(default)s)")
    add_nice_argument(parser)
    add("--assert-targets", action="store_true", help="fail if a target is missed")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write `predictor.json`; 1 if an asserted target is missed."""
    if args.repeats < 1 or args.seconds <= 0:
        raise ValueError("--repeats must be at least 1, --seconds above 0")
    console = make_console()
    latencies, throughputs = _measure_cost(args)
    size = weights_bytes(args.predictor)
    _print_cost(console, latencies, throughputs, size)
    paces = _simulate_paces(throughputs, args.requests)
    _print_paces(paces)
    targets = cost_targets(latencies, throughputs, size)
    steps: Mapping[str, StepTimes] = {}
    if args.engine:
        steps = _measure_engine(args)
        _print_steps(console, steps, args.rate)
        targets.append(step_target(steps, args.rate))
    print_targets(targets)
    document = {
        "environment": environment(),
        "options": vars(args),
        "latency_seconds": [asdict(latency) for latency in latencies],
        "throughput": [asdict(throughput) for throughput in throughputs],
        "weights_bytes": size,
        "pace": [asdict(pace) for pace in paces],
        "step_time_seconds": {condition: asdict(times) for condition, times in steps.items()},
        "targets": [{**asdict(target), "met": target.met} for target in targets],
    }
    path = args.output / "predictor.json"
    write_json(path, document)
    console.print(f"figures: {path}", soft_wrap=True)
    return print_problems(console, missed(targets) if args.assert_targets else [])


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
