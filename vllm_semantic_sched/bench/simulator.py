"""How fast the simulator is, and whether its time and memory grow with the requests as they
should."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SCENARIO = "speed"
_MEBIBYTE = 1024  # kibibytes, in which the operating system counts


@dataclass(frozen=True, slots=True)
class Speed:
    """One run: CPU seconds, engine steps, and the most memory that its process ever had."""

    requests: int
    seconds: float
    steps: int
    mebibytes: float

    @property
    def microseconds(self) -> float:
        """CPU time per request."""
        return self.seconds / self.requests * 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched bench simulator`."""
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        metavar="N",
        help="sizes of the runs (default: 10000 100000)",
    )
    parser.add_argument(
        "--scenario", default=_SCENARIO, metavar="FILE|NAME", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Run the scenario at each size and print time, memory and growth."""
    from vllm_semantic_sched.bench.console import make_console, make_table

    speeds = measure(args.requests, args.scenario)
    columns = ("requests", "CPU s", "steps", "us per request", "times the first", "peak MiB")
    table = make_table("Simulator, one process", *columns, words=0)
    for speed in speeds:
        table.add_row(
            f"{speed.requests:,}",
            f"{speed.seconds:.1f}",
            f"{speed.steps:,}",
            f"{speed.microseconds:.0f}",
            f"{speed.microseconds / speeds[0].microseconds:.2f}",
            f"{speed.mebibytes:.0f}",
        )
    make_console().print(table)
    return 0


def measure(sizes: Sequence[int], scenario: str = _SCENARIO) -> list[Speed]:
    """One run per size, each in a process of its own, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    speeds = []
    for size in sizes:
        with context.Pool(1) as pool:
            speeds.append(pool.apply(_measure_one, (size, scenario)))
    return speeds


def _measure_one(requests: int, name: str) -> Speed:
    from vllm_semantic_sched.sim.metrics import Recorder
    from vllm_semantic_sched.sim.scenario import load_scenarios
    from vllm_semantic_sched.sim.simulation import simulate

    scenario = load_scenarios(name, {"workload.requests": requests})[0]
    scheduler = next(iter(scenario.policies))
    recorder = Recorder(scenario.slos(scheduler))
    start = time.process_time()
    steps = simulate(scenario, scheduler, finished=recorder.add).steps
    recorder.levels()
    seconds = time.process_time() - start
    return Speed(requests, seconds, steps, _peak_kibibytes() / _MEBIBYTE)


def _peak_kibibytes() -> int:
    # Not ru_maxrss where it can be helped: on Linux that begins with the parent's.
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
