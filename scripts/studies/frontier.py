"""What the urgent gain and what that costs the others, over the price of holds.

Simulates the cell of the scenario `price` with prompts of 1,500 tokens at one and a half times the
capacity, under several prices and under the shipped policies, and draws level 0's mean latency over
the tokens per second, relative to FCFS.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import main

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.sim.runner import cells_of, mapped, run_task, tasks_of
from vllm_semantic_sched.sim.scenario import load_scenarios

PRICES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
OTHERS = ("latency", "throughput")


def schedulers() -> dict[str, dict[str, Any]]:
    """FCFS, the order alone, a policy per price, and shipped policies."""
    return {
        "fcfs": {"policy": "fcfs"},
        "order alone": {"policy": "ems", "protect": {"level": None}},
        **{f"price {price:g}": {"policy": "ems", "protect": {"price": price}} for price in PRICES},
        **{name: {"policy": name} for name in OTHERS},
    }


def measure(requests: int, workers: int) -> dict[str, dict[str, float]]:
    """By scheduler: tokens/s relative to FCFS, mean latency of levels 0, 1 and 4, seconds."""
    cell = {"workload.prompt.median": 1500, "workload.rate": 4.0, "workload.speed": 1.5}
    changes = {**cell, "workload.requests": requests, "schedulers": schedulers(), "sweep": []}
    tasks = tasks_of(load_scenarios("price", changes))
    results = list(mapped(run_task, tasks, workers))
    cells = {cell.scheduler: cell.levels for cell in cells_of(tasks, results)}
    fcfs = cells["fcfs"]["all"]["tokens_per_second"]
    return {
        name: {
            "tokens": levels["all"]["tokens_per_second"] / fcfs,
            **{f"level {level}": levels[str(level)]["e2e_mean"] for level in (0, 1, 4)},
        }
        for name, levels in cells.items()
    }


def draw(figures: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Level 0's mean latency over tokens/s: the prices as a line, the others as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    line = [name for name in figures if name.startswith(("order", "price"))]
    place = {name: (row["tokens"], row["level 0"]) for name, row in figures.items()}
    axis.plot(*zip(*(place[name] for name in line), strict=True), marker="o", color="#2f7ebc")
    rest = [name for name in figures if name not in line and name != "fcfs"]
    axis.plot(*zip(*(place[name] for name in rest), strict=True), "s", color="#8c8c8c")
    for name in (*line, *rest):
        # Away from the line: labels of the policies above it, of the prices below.
        offset = (8, -16) if name in line else (-44, 10)
        axis.annotate(name, place[name], offset, textcoords="offset points", fontsize=9)
    axis.set_xlabel("output tokens per second, as a share of FCFS's")
    axis.set_ylabel("mean latency of level 0, s")
    axis.margins(x=0.16)
    axis.set_ylim(0, 1.3 * max(place[name][1] for name in line))
    fcfs = place["fcfs"][1]
    title = f"A higher price makes level 0 faster and costs throughput (FCFS: {fcfs:.0f} s)"
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def run(args: argparse.Namespace) -> int:
    """Simulate, print a table, write frontier.json and frontier.png."""
    figures = measure(args.requests, args.workers)
    print_table(
        "prompts of 1,500 tokens, 1.5 times the capacity; mean latency, s",
        ("policy", "tokens/s, of FCFS", "level 0", "level 1", "level 4"),
        (
            (name, f"{row['tokens']:.3f}", *(f"{row[f'level {n}']:.1f}" for n in (0, 1, 4)))
            for name, row in figures.items()
        ),
    )
    (args.output / "frontier.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(figures, args.output / "frontier.png")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--requests", type=int, default=3000, help="per policy (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
