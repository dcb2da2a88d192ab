"""Urgent messages beside prompts of 16,000 tokens, on a real `vllm serve`.

First some requests of level 4 with long prompts arrive at once, then urgent messages one by one.
The study compares how fast these get their first token and the others, and when the long prompts
get theirs: under vLLM's schedulers, the policy `ems`, and `ems` without holds. Prints a table and
writes `long-prompts.json`. The model must take such prompts:
`semsched bench make-model DIR --max-model-len 20480`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from common import main, percentiles, serve, write_json

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.bench.command_line import add_server_arguments
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import BenchRequest, write_context, write_message
from vllm_semantic_sched.policy.config.files import read_config

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.client import Record

_CONTEXT = 1000  # tokens, about, of each piece of a long prompt
_LONG_ANSWER = 16
_FIRST_URGENT = 1.0  # seconds after the long prompts


def schedulers(output: Path) -> list[SchedulerSpec]:
    """Return vLLM's schedulers, `ems`, and `ems` without holds."""
    data, _ = read_config("ems", kind="policy")
    path = output / "no-holds.yaml"
    path.write_text(yaml.safe_dump({**data, "protect": {"level": None}}))
    return [
        SchedulerSpec("fcfs", "fcfs"),
        SchedulerSpec("priority", "priority"),
        SchedulerSpec("ems", "semantic-true", "ems"),
        SchedulerSpec("no holds", "semantic-true", str(path.resolve())),
    ]


def make_load(args: argparse.Namespace) -> list[BenchRequest]:
    """Return the long prompts and the urgent messages, in order of arrival."""
    rng = np.random.default_rng(args.seed)
    pieces = max(1, round(args.tokens / _CONTEXT))
    load = []
    for number in range(args.long):
        text = " ".join(write_context(rng) for _ in range(pieces))
        load.append(BenchRequest(number, 0.0, 4, text, _LONG_ANSWER))
    for number in range(args.urgent):
        time = _FIRST_URGENT + number * args.gap
        text = write_message(0, rng)
        load.append(BenchRequest(len(load), time, 0, text, args.answer))
    return load


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Return the row of one scheduler, times in seconds."""
    urgent = [record for record in records if record.level == 0]
    long = [record for record in records if record.level == 4]
    return {
        "ttft": percentiles([record.ttft for record in urgent if record.ttft is not None]),
        "tpot": percentiles([record.tpot for record in urgent if record.tpot is not None]),
        "long_ttft": [record.ttft for record in long],
        "prompt_tokens": max(record.prompt_tokens for record in long),
        "failed": sum(not record.ok for record in records),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_server_arguments(parser)
    parser.set_defaults(seats=8, blocks=2400, stream_interval=1)
    add = parser.add_argument
    add("--long", type=int, default=3, help="long prompts (default: %(default)s)")
    add("--tokens", type=int, default=16000, help="of each of them, about (%(default)s)")
    add("--urgent", type=int, default=24, help="urgent messages (default: %(default)s)")
    add("--gap", type=float, default=1.5, help="seconds between them (default: %(default)s)")
    add("--answer", type=int, default=32, help="tokens of their answers (default: %(default)s)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Measure each scheduler; 1 if a request failed."""
    load = make_load(args)
    rows = {}
    for spec in schedulers(args.output):
        with serve(args, spec, max(args.answer, _LONG_ANSWER)) as (server, client):
            client.send_together(load[-2:])  # warm-up
            rows[spec.title if spec.kind != "semantic-true" else spec.name] = summarize(
                client.send(load, spec.name)
            )
            server.check()
    write_json(args.output / "long-prompts.json", rows)
    heads = ("TTFT p50, s", "p99", "per token p50, ms", "p99", "long prompts: TTFT mean, s", "last")
    shown = []
    for name, row in rows.items():
        long = [time for time in row["long_ttft"] if time is not None]
        last = max(long, default=float("nan"))
        shown.append(
            (
                name,
                *(f"{time:.2f}" for time in row["ttft"]),
                *(f"{1e3 * time:.0f}" for time in row["tpot"]),
                f"{sum(long) / max(1, len(long)):.1f}",
                f"{last:.1f}",
            )
        )
    print_table("urgent messages beside long prompts", ("scheduler", *heads), shown)
    print(f"longest prompt: {max(row['prompt_tokens'] for row in rows.values())} tokens")
    return 1 if any(row["failed"] for row in rows.values()) else 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
