"""Disturb a real server for hours and check that nothing on it grows.

Rounds like those of `chaos.py` follow each other: clients leave, send hints and duplicates,
policies change, the predictor is killed, the server is paused. After each round, when the server
is idle, the study notes memory, file descriptors and threads of each kind of process, what the
scheduler stores (jobs, heap entries, KV blocks, host blocks), and the series on the metrics page.
The first quarter of the samples is warm-up; after it no figure may rise (`Growth`). Prints a
table, and writes `soak.json` and a picture, `soak.png`.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chaos
import numpy as np
import psutil
from common import main, write_json

from vllm_semantic_sched.cli.console import make_console, print_table
from vllm_semantic_sched.lab.bench.command_line import print_problems
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer, process_title
from vllm_semantic_sched.operate.client import AdminClient

_LEAST_SAMPLES = 8
_WARM_UP = 0.25  # share of the samples
_MEMORY_SHARE = 0.05  # that memory may grow by from the first third after the warm-up to the last
_MEMORY_FLOOR = 32.0  # MiB that it may grow by in any case
_COUNT_FLOOR = 3.0

Sample = dict[str, float]
"""Figures by name at one moment; those of memory end in MiB."""


@dataclass(frozen=True)
class Growth:
    """How one figure changed: medians of the first and the last third after the warm-up."""

    name: str
    first: float
    last: float

    @property
    def allowed(self) -> float:
        """The largest `last` that does not count as growth."""
        if self.name.endswith("MiB"):
            return self.first + max(_MEMORY_FLOOR, _MEMORY_SHARE * self.first)
        return self.first + _COUNT_FLOOR

    @property
    def grows(self) -> bool:
        """Whether the figure rose by more than noise."""
        return self.last > self.allowed


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Return the change of each figure; one that a sample lacks was 0 then. ValueError with fewer
    than 8 samples."""
    if len(samples) < _LEAST_SAMPLES:
        raise ValueError(f"{len(samples)} samples do not tell: at least {_LEAST_SAMPLES}")
    steady = samples[int(_WARM_UP * len(samples)) :]
    third = max(1, len(steady) // 3)
    growths = []
    for name in sorted({name for sample in samples for name in sample}):
        values = [sample.get(name, 0.0) for sample in steady]
        growths.append(
            Growth(name, float(np.median(values[:third])), float(np.median(values[-third:])))
        )
    return growths


def take_sample(server: VllmServer) -> Sample:
    """Return the figures of an idle server."""
    sample: Counter[str] = Counter()
    leader = psutil.Process(server.pid)
    for process in (leader, *leader.children(recursive=True)):
        try:
            with process.oneshot():
                title = process_title(process.cmdline()) or process.name()
                kind = "API server" if process.pid == leader.pid else title.rsplit(".", 1)[-1]
                sample[f"{kind}: memory, MiB"] += process.memory_info().rss / 2**20
                sample[f"{kind}: file descriptors"] += process.num_fds()
                sample[f"{kind}: threads"] += process.num_threads()
                sample["processes"] += 1
        except psutil.NoSuchProcess:
            continue
    for engine in AdminClient(server.url).status():
        for name in ("jobs", "heap_entries"):
            sample[name.replace("_", " ")] += engine[name]
    page = [line for line in server.get_text("/metrics").splitlines() if line[:1] != "#"]
    sample["metric series"] = len(page)
    for line in page:
        if line.startswith(("semsched:host_pool_usage", "vllm:kv_cache_usage_perc")):
            name = "host pool" if "host_pool" in line else "KV cache"
            sample[f"{name} in use, %"] += 100 * float(line.rsplit(" ", 1)[1])
    return dict(sample)


def draw(samples: Sequence[Sample], hours: Sequence[float], path: Path) -> None:
    """Draw each figure relative to its value at the end of the warm-up."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5))
    start = int(_WARM_UP * len(samples))
    for name in sorted(samples[start]):
        base = samples[start][name]
        if base:
            axis.plot(hours, [sample.get(name, 0.0) / base for sample in samples], lw=1, label=name)
    axis.axvspan(0, hours[start], color="0.9", lw=0)
    axis.set(xlabel="hours (grey: warm-up)", ylabel="relative to the end of the warm-up")
    axis.set_ylim(0)
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for logs and results")
    add("--hours", type=float, default=1.0, help="how long (default: %(default)s)")
    add("--requests", type=int, default=300, help="of a round (default: %(default)s)")
    add("--pause", type=float, default=0.0, help="idle seconds between rounds (%(default)s)")
    add("--host-gib", type=float, default=0.003, help="host pool (%(default)s: often full)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Disturb a server for hours; 1 if something grows or a guarantee is violated."""
    policy = args.output / "policy.yaml"
    log = args.output / "events.jsonl"
    policy.write_text(f"{chaos.BASE_POLICY}events: {{path: {log.resolve()}}}\n")
    config = ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=8,
        num_blocks=40,
        scheduler_args=chaos.server_arguments(policy, args.host_gib),
    )
    samples: list[Sample] = []
    hours: list[float] = []
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    begin = time.monotonic()
    with VllmServer(config) as server:
        while not hours or hours[-1] < args.hours:
            seed = args.seed + len(samples)
            report = chaos.disturb(server, policy, args.requests, 40, 30, seed)
            outcomes += report.outcomes + report.disturbances
            problems += report.problems
            samples.append(take_sample(server))
            hours.append((time.monotonic() - begin) / 3600)
            _show(hours[-1], args.hours, len(samples), len(problems))
            write_json(args.output / "soak.json", {"hours": hours, "samples": samples})
            time.sleep(args.pause)
    growths = growth(samples)
    console = make_console()
    print_table(
        f"{len(samples)} rounds in {hours[-1]:.2f} h",
        ("figure", "first third", "last", "allowed"),
        (
            (figure.name, *map(round, (figure.first, figure.last, figure.allowed)))
            for figure in growths
        ),
    )
    console.print(", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())))
    draw(samples, hours, args.output / "soak.png")
    problems += [
        f"{figure.name} grows from {figure.first:.0f} to {figure.last:.0f}"
        for figure in growths
        if figure.grows
    ]
    return print_problems(console, problems)


def _show(hour: float, hours: float, rounds: int, problems: int) -> None:
    text = f"{60 * hour:.0f} of {60 * hours:.0f} min, {rounds} rounds, {problems} problems"
    end = "\r" if sys.stdout.isatty() else "\n"
    print(text, end=end, flush=True)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
