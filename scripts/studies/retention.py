"""Compare the retention modes of preempted requests under load, on a real `vllm serve`.

Runs FCFS and each mode, prints throughput, preemptions and the latency of the levels that pay for
them, and writes `results.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from common import Target, main, missed, print_targets

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.bench import command_line
from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.lab.bench.compare import compare
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec, swap_arguments
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.files import read_config

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.bench.results import MixResult

_MODES = "optimal,recompute,swap,paper"
_FCFS = "fcfs"
_BANDS = (128, 256, 512)  # prompt and output tokens
_NOISE = 0.02


def schedulers(args: argparse.Namespace, modes: Sequence[str]) -> list[SchedulerSpec]:
    """Return FCFS, and the policy in each mode with host memory; levels come as hints. PolicyError
    if there is no such policy or mode."""
    extra = swap_arguments(args.host_gib)
    return [
        SchedulerSpec(_FCFS, "fcfs"),
        *(
            SchedulerSpec(
                f"semantic-true@{mode}",
                "semantic-true",
                str(_policy(args, mode)),
                extra,
                args.profile,
            )
            for mode in modes
        ),
    ]


def _policy(args: argparse.Namespace, mode: str) -> Path:
    data, source = read_config(args.policy, kind="policy")
    data = {**(data or {}), "predictor": {"enabled": False}}
    data["retention"] = {**data.get("retention", {}), "mode": mode}
    parse_policy(data, source)
    path: Path = args.output / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path.resolve()


def describe(rows: dict[str, MixResult]) -> list[str]:
    """Return lines per scheduler: throughput, preemptions, tokens, and the latency of levels 1 to 4
    compared with recomputing, by length."""
    lines = []
    recompute = _row(rows, "recompute")
    for name, row in rows.items():
        counters = row.best.usage.counters
        tokens = {
            what: int(counters.get(f"semsched:{what}_tokens_total", 0))
            for what in ("saved", "loaded", "found", "recomputed")
        }
        lines.append(
            f"{name}: {row.best.tokens_per_second:.0f} output tokens/s, "
            f"{int(counters.get('semsched:preemptions_total', 0))} preemptions, tokens "
            + ", ".join(f"{count} {what}" for what, count in tokens.items())
        )
        if recompute is not None and row is not recompute:
            added = added_latency(recompute, row)
            bands = ", ".join(
                f"{band} tokens {seconds:+.2f} s ({count})"
                for band, (seconds, count) in added.items()
            )
            lines.append(f"  E2E of levels 1 to 4 against recompute: {bands}")
    return lines


def added_latency(base: MixResult, row: MixResult) -> dict[str, tuple[float, int]]:
    """Compare the E2E latency of levels 1 to 4, which pay for preemptions, with that under `base`,
    in the best rounds: mean added seconds and number of requests, by band of prompt and output
    tokens."""
    before = {record.index: record for record in base.records if record.ok}
    bands: dict[str, list[float]] = {}
    for record in row.records:
        match = before.get(record.index)
        if record.level == 0 or not record.ok or match is None:
            continue
        assert record.finish is not None and match.finish is not None
        added = (record.finish - record.arrival) - (match.finish - match.arrival)
        band = _band(record.prompt_tokens + record.output_tokens)
        bands.setdefault(band, []).append(added)
    return {
        band: (sum(bands[band]) / len(bands[band]), len(bands[band]))
        for band in map(_band, (0, *_BANDS))
        if band in bands
    }


def _band(tokens: int) -> str:
    for low, high in zip((0, *_BANDS), _BANDS, strict=False):
        if tokens < high:
            return f"{low} to {high}"
    return f"{_BANDS[-1]} or more"


def _row(rows: dict[str, MixResult], mode: str) -> MixResult | None:
    return rows.get(f"semantic-true@{mode}")


def check(rows: dict[str, MixResult]) -> list[Target]:
    """Return the targets of `optimal` compared with FCFS and each other mode, less noise."""
    optimal = _row(rows, "optimal")
    if optimal is None:
        return []
    targets = []
    for name, row in rows.items():
        if row is optimal:
            continue
        required = 0.99 if name == _FCFS else 1.0 - _NOISE
        ratio = optimal.best.tokens_per_second / row.best.tokens_per_second
        targets.append(Target(f"output tokens per second, optimal / {name}", ratio, required))
        waiting = row.levels["0"]["normalized_waiting"].mean
        waiting /= optimal.levels["0"]["normalized_waiting"].mean
        text = f"level 0, mean normalized_waiting, {name} / optimal"
        targets.append(Target(text, waiting, required=1.0 if name == _FCFS else 0.9))
    return targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    command_line.add_plan_arguments(parser, requests=400, max_burst=50, overload=8.0)
    add = parser.add_argument
    add("--modes", default=_MODES, help="retention modes, comma-separated (default: %(default)s)")
    add("--mix", default="even", help="name or five weights (default: %(default)s)")
    add("--profile", help="engine profile, by name or path; measure one with semsched profile")
    add("--host-gib", type=float, default=1.0, help="host pool, GiB (default: %(default)s)")
    add("--assert-targets", action="store_true", help="fail if a required ratio is missed")


def run(args: argparse.Namespace) -> int:
    """Run FCFS and each mode; 1 if a request failed or a target is missed."""
    modes = [mode.strip() for mode in args.modes.split(",")]
    plan = command_line.make_plan(args, schedulers(args, modes), [args.mix])
    console = make_console()
    result = compare(plan, vars(args), Progress(not args.quiet))
    rows = result.mixes[args.mix]
    command_line.print_mix(console, args.mix, rows)
    for line in describe(rows):
        console.print(line, soft_wrap=True)
    targets = check(rows)
    print_targets(targets)
    console.print(f"records: {plan.output / 'results.json'}", soft_wrap=True)
    problems = result.failures()
    if args.assert_targets:
        problems += missed(targets)
    return command_line.print_problems(console, problems)


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
