"""Schedulers under load on the emulated device: real vLLM, step times from a profile, in virtual
time.

A Poisson load of chat-like prompts (lognormal, 1,500 tokens in the median; answers of 250), or a
trace with its own arrivals, is sent at a multiple of the rate that vLLM's own scheduler can serve.
Tokens per busy second, device idle and the cost of holds are those of a window in which the load is
steady: from `--warm` seconds to the last arrival, without the drain, in which only long answers are
left. Latencies are those of all requests, in seconds.

example:
  python scripts/studies/device_load.py --output load --scheduler fcfs priority ems --factor 1 1.75
"""

import argparse
import itertools
from dataclasses import dataclass
from pathlib import Path

from common import main, write_figures

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.bench.device_use import LABEL
from vllm_semantic_sched.lab.bench.prompts import PROMPTS, TRACE
from vllm_semantic_sched.lab.device.figures import (
    DeviceFigures,
    HoldCosts,
    LevelFigures,
    capacity,
    device_figures,
    level_figures,
)
from vllm_semantic_sched.lab.device.gpus import SHIPPED
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, faster, load_of
from vllm_semantic_sched.lab.device.virtual import SCHEDULERS, EngineConfig, VirtualEngine

_LEVELS = 5
_SHOWN = "TTFT, p99, latency, s/token"


@dataclass(frozen=True)
class Row:
    """One run. `charged`, `lost`: seconds of holds in the window, as charged and as they were."""

    device: DeviceFigures
    levels: tuple[LevelFigures, ...]
    everyone: LevelFigures
    window: float
    charged: float = 0.0
    lost: float = 0.0
    preemptions: float = 0.0


def measure(load: list[LoadRequest], config: EngineConfig, warm: float) -> Row:
    """Run a load, sent as it is."""
    ours = config.scheduler == "semantic"
    with VirtualEngine(config) as engine:
        holds = HoldCosts(engine) if ours else None
        engine.send(load)
        engine.run()
        records = [engine.records[request.name] for request in load]
        end = load[-1].arrival
        begin = min(warm, end / 2)
        charged, lost = holds.between(begin, end) if holds else (0.0, 0.0)
        count = engine.scheduler.counters.total("preemptions") if ours else float("nan")
        by_level = [
            [record for record in records if record.level == level] for level in range(_LEVELS)
        ]
        return Row(
            device=device_figures(engine.steps, begin, end),
            levels=tuple(map(level_figures, by_level)),
            everyone=level_figures(records),
            window=end - begin,
            charged=charged,
            lost=lost,
            preemptions=count,
        )


def configured(args: argparse.Namespace, scheduler: str, swap: float | None) -> EngineConfig:
    """The engine for a scheduler of vLLM or a policy of ours."""
    stock = scheduler in SCHEDULERS
    return EngineConfig(
        scheduler=scheduler if stock else "semantic",
        policy="fcfs" if stock else scheduler,
        seats=args.seats,
        asynchronous=not args.sync,
        profile=SHIPPED[args.profile].profile if args.profile in SHIPPED else args.profile,
        given_profile=args.given_profile,
        kv_gib=args.kv_gib,
        budget=args.budget,
        prefix_cache=args.prefix_cache,
        swap_gib=None if stock else swap,
        host_seconds=args.host_seconds,
    )


def print_rows(rows: dict[str, Row], first: str) -> None:
    """One table; `first` is what tokens are relative to. Holds: share of the window that they were
    charged, and that they cost."""
    base = rows[first].device.tokens
    names = ["run", "tokens/ busy s", "of first", "steps", "batch", "idle %", "held %", "true %"]
    names += ["all: s/token", *(f"level {level}: {_SHOWN}" for level in range(_LEVELS))]
    table = []
    for name, row in rows.items():
        device = row.device
        line = [
            name,
            f"{device.tokens:.0f}",
            f"{device.tokens / base:.3f}",
            device.steps,
            f"{device.batch:.0f}",
            f"{100 * device.idle:.2f}",
            f"{100 * row.charged / row.window:.1f}",
            f"{100 * row.lost / row.window:.1f}",
            f"{row.everyone.waiting:.3f}",
        ]
        for figures in row.levels:
            times = f"{figures.ttft:.1f} {figures.ttft_p99:.1f} {figures.latency:.1f}"
            line.append(f"{times} {figures.waiting:.3f}")
        table.append(line)
    print_table(LABEL, names, table)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--scheduler", nargs="+", default=["fcfs", "priority", "ems"], metavar="NAME",
        help="fcfs or priority of vLLM, or a policy")  # fmt: skip
    add("--factor", nargs="+", type=float, default=[1.75], help="of the capacity")
    add("--swap", nargs="+", type=float, default=[0.0], metavar="GIB", help="0: without")
    add("--profile", default="a100", help="a100, h100, a shipped name or a path")
    add("--given-profile", help="what the scheduler is told, if not the device's")
    add("--seats", type=int, default=128)
    add("--kv-gib", type=float, default=58.0)
    add("--budget", type=int, default=2048, help="most tokens in a step")
    add("--prompts", default="chat", help=f"{', '.join((*PROMPTS, TRACE))} or the file of a trace")
    add("--requests", type=int, default=600)
    add("--warm", type=float, default=20.0, help="seconds before the window")
    add("--seed", type=int, default=5)
    add("--sync", action="store_true", help="synchronous scheduling")
    add("--host-seconds", type=float, default=0.0, help="work on the host before each step")
    add("--prefix-cache", action="store_true")
    add("--output", type=Path, help="folder for figures.json")


def run(args: argparse.Namespace) -> int:
    """Run all combinations, and print one table."""
    load = load_of(args.prompts, LoadConfig(args.requests, 1.0, args.seed))
    rate = capacity(load, configured(args, "fcfs", None))
    print(f"capacity: {rate:.2f} requests/s", flush=True)
    rows: dict[str, Row] = {}
    for factor, scheduler, swap in itertools.product(args.factor, args.scheduler, args.swap):
        if swap and scheduler in SCHEDULERS:
            continue
        name = f"{scheduler}, swap {swap:g} GiB" if swap else scheduler
        name = f"{name}, {factor:g}x"
        config = configured(args, scheduler, swap or None)
        rows[name] = measure(faster(load, factor * rate), config, args.warm)
    print_rows(rows, next(iter(rows)))
    write_figures(args.output, rows)
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
