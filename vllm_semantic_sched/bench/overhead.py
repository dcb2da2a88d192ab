"""`semsched bench overhead`: time of `schedule()` with many requests waiting.

Real vLLM schedulers with a KV cache that exists on paper only: no weights, no GPU. All
schedulers and sizes are built first and then stepped in turn, so that whatever else the
machine does falls on all of them alike. Times are CPU time of the thread: a step never waits
for anything, so that this is what it takes on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_semantic_sched.bench.everything import write_everything

if TYPE_CHECKING:
    from vllm_semantic_sched.bench.crowd import Crowd

_STOCK = "stock"
_PARTS = ("schedule", "update", "arrival")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench overhead`."""
    add = parser.add_argument
    add("--waiting", default="1000,10000,100000", help="waiting requests (%(default)s)")
    add("--running", type=int, default=256, help="decoding requests (%(default)s)")
    add("--policies", default="ems,fcfs", help="of SemanticScheduler (%(default)s)")
    add(
        "--everything",
        action="store_true",
        help="measure a policy with aging, deadlines, shares, tenants and reservations, too",
    )
    add("--tenants", type=int, default=100, help="tenants that ask (%(default)s)")
    add("--steps", type=int, default=400, help="timed steps (%(default)s)")
    add("--arrivals", type=int, default=2, help="new requests per step (%(default)s)")
    add("--finish-every", type=int, default=8, help="steps per finished request (%(default)s)")
    add("--json", type=Path, help="file for the figures")


def run(args: argparse.Namespace) -> int:
    """Measure and print; always 0."""
    sizes = [int(size) for size in args.waiting.split(",")]
    names = [_STOCK, *(name.strip() for name in args.policies.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: name for name in names if name != _STOCK}
        if args.everything:
            names.append("everything")
            files["everything"] = str(write_everything(Path(folder)))
        times = _measure(args, sizes, names, files)
    figures = {
        (name, size): {part: _percentiles(times[name, size, part]) for part in _PARTS}
        for name in names
        for size in sizes
    }
    _print(figures, sizes, names, args)
    if args.json:
        document = {
            "running": args.running,
            "steps": args.steps,
            "arrivals_per_step": args.arrivals,
            "microseconds": [
                {"scheduler": name, "waiting": size, **parts}
                for (name, size), parts in figures.items()
            ],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _measure(
    args: argparse.Namespace, sizes: Sequence[int], names: Sequence[str], files: dict[str, str]
) -> dict[tuple[str, int, str], list[float]]:
    from tqdm import tqdm

    from vllm_semantic_sched.bench.crowd import Crowd

    crowds: dict[tuple[str, int], Crowd] = {}
    cases = [(name, size) for size in sizes for name in names]
    for name, size in tqdm(cases, desc="filling the queues"):
        crowds[name, size] = Crowd(files.get(name), args.running, size, args.tenants)
    # As vLLM's engine does after start: a collection would otherwise walk every request.
    gc.collect()
    gc.freeze()
    times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    warm_up = 20
    for step in tqdm(range(args.steps + warm_up), desc="stepping"):
        finish = step % args.finish_every == 0
        for (name, size), crowd in crowds.items():
            for part, seconds in _step(crowd, args.arrivals, finish):
                if step >= warm_up:
                    times[name, size, part].append(seconds)
    return times


def _step(crowd: Crowd, arrivals: int, finish: bool) -> Iterator[tuple[str, float]]:
    requests = [crowd.new_request() for _ in range(arrivals)]
    start = time.thread_time()
    for request in requests:
        crowd.scheduler.add_request(request)
    yield "arrival", (time.thread_time() - start) / max(1, arrivals)
    start = time.thread_time()
    output = crowd.scheduler.schedule()
    yield "schedule", time.thread_time() - start
    answer = crowd.answer(output, finish_one=finish)
    start = time.thread_time()
    crowd.scheduler.update_from_output(output, answer)
    yield "update", time.thread_time() - start


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in microseconds."""
    import numpy as np

    p50, p99 = np.percentile(np.array(seconds) * 1e6, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def _print(
    figures: dict[tuple[str, int], dict[str, dict[str, float]]],
    sizes: Sequence[int],
    names: Sequence[str],
    args: argparse.Namespace,
) -> None:
    from vllm_semantic_sched.bench.console import make_console, make_table

    table = make_table(
        f"one step with {args.running} running, microseconds of CPU time (p50 / p99)",
        "scheduler", "waiting", "schedule()", "vs stock", f"vs {sizes[0]} waiting",
        "update_from_output()", "add_request()", "whole step vs stock",
    )  # fmt: skip
    for name in names:
        for size in sizes:
            parts, stock = figures[name, size], figures[_STOCK, size]
            p50 = parts["schedule"]["p50"]
            table.add_row(
                "vLLM FCFS" if name == _STOCK else f"semantic, {name}",
                f"{size:,}",
                _cell(parts["schedule"]),
                f"{p50 / stock['schedule']['p50']:.2f}x",
                f"{p50 / figures[name, sizes[0]]['schedule']['p50']:.2f}x",
                _cell(parts["update"]),
                _cell(parts["arrival"]),
                f"{_whole(parts) / _whole(stock):.2f}x",
            )
    make_console().print(table)


def _cell(figure: dict[str, float]) -> str:
    return f"{figure['p50']:.0f} / {figure['p99']:.0f}"


def _whole(parts: dict[str, dict[str, float]]) -> float:
    return parts["schedule"]["p50"] + parts["update"]["p50"]
