"""The simulator against vLLM on an emulated device: the same loads in both, in virtual time.

Runs each policy at multiples of the rate that vLLM's own scheduler can serve, and the default one
with KV swap and with the prefix cache, too: that load with shared beginnings, and conversations
(`urgent_cache.py`) for which the cache is too small. Prints the errors of the simulator.

With --whatif: records loads with an engine that only observes, predicts from its event log what
other policies would do (`semsched whatif`), runs the same loads under them, and compares.

examples:
  python scripts/studies/validation.py --output validation
  python scripts/studies/validation.py --whatif --output whatif
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import urgent_cache
from common import main, write_json
from device_load import capacity

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.device.agreement import (
    ALL,
    Agreement,
    agreement,
    device_figures_of,
)
from vllm_semantic_sched.lab.device.load import LoadConfig, LoadRequest, draw_load, faster
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.lab.whatif import METRICS, SAME, read_log, replay
from vllm_semantic_sched.policy.config import load_policy, parse_policy
from vllm_semantic_sched.policy.config.files import shipped_names

TARGETS = {"mean E2E": 0.03, "p99 TTFT": 0.10, "steps": 0.02, "tokens found": 0.02}
"""Largest error of each figure; that of p99 TTFT counts for each level."""

_SWAP_GIB = 40.0
_CONVERSATIONS = 6  # of level 0
_CONVERSATION_BLOCKS = 4000
_PREFIXES = {"prefixes": 12, "prefix_tokens": 768}
_WHATIF_POLICIES = ("ems", "tiers")
_WHATIF_LEVELS = 3  # as many as the policy with the fewest
_UNREAD = {"predictor": {"enabled": False}}


@dataclass(frozen=True)
class Case:
    """A policy and a load, as a multiple of the capacity."""

    policy: str
    factor: float
    swap: bool = False
    prefixes: bool = False
    conversations: bool = False

    def __str__(self) -> str:
        parts = (
            self.policy,
            self.swap and "swap",
            (self.prefixes or self.conversations) and "prefix cache",
        )
        return ", ".join(part for part in parts if part)

    def config(self, args: argparse.Namespace) -> EngineConfig:
        return replace(
            engine_config(args),
            policy=self.policy,
            swap_gib=_SWAP_GIB if self.swap else None,
            prefix_cache=self.prefixes or self.conversations,
            blocks=_CONVERSATION_BLOCKS if self.conversations else None,
        )

    @property
    def load(self) -> str:
        """The load in a word."""
        return "conversations" if self.conversations else f"{self.factor:g}x"


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(policy="fcfs", seats=args.seats, profile=args.profile)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for policy, factor in itertools.product(args.policy, args.factor):
        yield Case(policy, factor)
    if "ems" in args.policy:
        yield Case("ems", max(args.factor), swap=True)
        yield Case("ems", max(args.factor), prefixes=True)
        yield Case("ems", 1.0, conversations=True)


def drawn_load(args: argparse.Namespace, levels: int, prefixes: bool = False) -> list[LoadRequest]:
    """One request a second. Level 0 is the rarest, the last one the most frequent."""
    shared: dict[str, Any] = _PREFIXES if prefixes else {}
    mix = tuple(range(1, levels + 1))
    return draw_load(LoadConfig(args.requests, 1.0, args.seed, mix=mix, **shared))


def misses(errors_of: Agreement) -> list[str]:
    """The targets that were missed, with the worst error."""
    errors = {
        "mean E2E": [errors_of.e2e[ALL]],
        "p99 TTFT": [error for level, error in errors_of.ttft_p99.items() if level != ALL],
        "steps": [errors_of.steps],
        "tokens found": [errors_of.found],
    }
    worst = {name: max(map(_size, values)) for name, values in errors.items()}
    return [
        f"{name} {100 * error:.1f} %" for name, error in worst.items() if not error <= TARGETS[name]
    ]


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else abs(error)


def validate(args: argparse.Namespace) -> dict[Case, Agreement]:
    """Run all cases."""
    rate = capacity(drawn_load(args, 5), replace(engine_config(args), scheduler="fcfs"))
    print(f"capacity: {rate:.2f} requests/s", flush=True)
    agreements = {}
    for case in cases(args):
        if case.conversations:
            load = urgent_cache.load(_CONVERSATIONS, args.seed)
        else:
            load = drawn_load(args, load_policy(case.policy).levels, case.prefixes)
            load = faster(load, case.factor * rate)
        agreements[case] = agreement(load, case.config(args))
        print(f"{case}, {case.load}: {', '.join(misses(agreements[case])) or 'met'}", flush=True)
    return agreements


def agreement_table(agreements: dict[Case, Agreement]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows."""
    columns = [
        "policy",
        "load",
        "mean E2E, s",
        "error",
        "steps",
        "error",
        "tokens/ busy s",
        "error",
    ]
    columns += ["worst level's mean E2E", "p99 TTFT by level, s", "error", "answered"]
    columns += ["tokens found", "error"]
    rows = []
    for case, errors in agreements.items():
        device = errors.device
        simulated = errors.simulated
        levels = [name for name in device.levels if name != ALL]
        worst = max((errors.e2e[name] for name in levels), key=_size)
        rows.append(
            [
                str(case),
                case.load,
                f"{device.levels[ALL].e2e_mean:.1f}",
                _percent(errors.e2e[ALL]),
                str(device.steps),
                _percent(errors.steps),
                f"{device.tokens_per_second:.0f}",
                _percent(errors.tokens),
                _percent(worst),
                " / ".join(f"{device.levels[name].ttft_p99:.2f}" for name in levels),
                " / ".join(_percent(errors.ttft_p99[name]) for name in levels),
                f"{device.levels[ALL].count}, {simulated.levels[ALL].count}",
                str(device.found),
                _percent(errors.found),
            ]
        )
    return columns, rows


def _percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


# What-if


@dataclass(frozen=True)
class Prediction:
    """A metric of one level under one policy, in seconds: on the device, and as predicted."""

    load: str
    policy: str
    level: str
    metric: str
    real: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative to the device."""
        return self.predicted / self.real - 1.0


def validate_whatif(args: argparse.Namespace) -> list[Prediction]:
    """Record each load while observing, predict `_WHATIF_POLICIES`, and run them."""
    plain = drawn_load(args, _WHATIF_LEVELS)
    config = engine_config(args)
    rate = capacity(plain, replace(config, scheduler="fcfs"))
    print(f"capacity: {rate:.2f} requests/s", flush=True)
    cached = replace(config, prefix_cache=True)
    loads = {
        **{f"{factor:g}x": (faster(plain, factor * rate), config) for factor in args.factor},
        "prefixes": (
            faster(drawn_load(args, _WHATIF_LEVELS, prefixes=True), max(args.factor) * rate),
            cached,
        ),
    }
    predictions: list[Prediction] = []
    for name, (load, config) in loads.items():
        predictions += _predictions(name, load, config, args.output / f"{name}.jsonl")
        print(f"{name}: done", flush=True)
    return predictions


def _predictions(
    name: str, load: Sequence[LoadRequest], config: EngineConfig, log: Path
) -> Iterator[Prediction]:
    log.unlink(missing_ok=True)  # it would be continued
    observing = {"observe": True, "events": {"path": str(log.absolute())}}
    measured = {SAME: device_run(load, replace(config, policy=observing))}
    policies = {
        policy: parse_policy(load_policy(policy).model_dump(exclude_unset=True) | _UNREAD)
        for policy in _WHATIF_POLICIES
    }
    _, *predicted = replay(read_log(log)[0], policies).cells
    for policy in _WHATIF_POLICIES:
        measured[policy] = device_run(load, replace(config, policy=policy))
    for cell in predicted:
        for level, latencies in measured[cell.scheduler].items():
            for metric in METRICS:
                yield Prediction(
                    load=name,
                    policy=cell.scheduler,
                    level=level,
                    metric=metric,
                    real=getattr(latencies, metric),
                    predicted=cell.levels[level][metric],
                )


def device_run(load: Sequence[LoadRequest], config: EngineConfig) -> dict[str, Any]:
    """Latencies by level."""
    with VirtualEngine(config) as engine:
        engine.send(load)
        engine.run()
        return device_figures_of(engine).levels


def whatif_table(predictions: Sequence[Prediction]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows."""
    levels = list(dict.fromkeys(prediction.level for prediction in predictions))
    by_row: dict[tuple[str, str, str], dict[str, Prediction]] = {}
    for prediction in predictions:
        key = (prediction.load, prediction.policy, prediction.metric)
        by_row.setdefault(key, {})[prediction.level] = prediction
    rows = []
    for (load, policy, metric), by_level in by_row.items():
        cells = [
            f"{by_level[level].real:.3g} {_percent(by_level[level].error)}" for level in levels
        ]
        rows.append([load, "recorded" if policy == SAME else policy, metric, *cells])
    return ["load", "policy", "metric", *(f"level {level}" for level in levels)], rows


def summary(predictions: Sequence[Prediction]) -> Iterator[str]:
    """A sentence per metric about the policies that were predicted."""
    for metric in METRICS:
        errors = [
            abs(prediction.error)
            for prediction in predictions
            if prediction.metric == metric and prediction.policy != SAME
        ]
        yield f"{metric}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", nargs="+", default=shipped_names("policy"), metavar="NAME",
        help="default: all shipped ones")  # fmt: skip
    add("--factor", nargs="+", type=float, default=[1.0, 1.75], help="of the capacity")
    add("--requests", type=int, default=420, metavar="N")
    add("--seats", type=int, default=128)
    add("--profile", default="default", help="of the device: a shipped name or a path")
    add("--seed", type=int, default=5)
    add("--whatif", action="store_true", help="validate `semsched whatif` instead")
    add("--output", required=True, type=Path, help="folder for figures.json and table.md")


def run(args: argparse.Namespace) -> int:
    """Validate, print and write the figures; 3 if a target of the agreement is missed."""
    missed: list[str] = []
    if args.whatif:
        predictions = validate_whatif(args)
        columns, rows = whatif_table(predictions)
        figures: Any = [asdict(prediction) for prediction in predictions]
    else:
        agreements = validate(args)
        columns, rows = agreement_table(agreements)
        figures = [asdict(case) | asdict(errors) for case, errors in agreements.items()]
        for case, errors in agreements.items():
            missed += [f"{case}, {case.load}: {miss}" for miss in misses(errors)]
    title = "emulated device: real vLLM, step times from a profile"
    print_table(f"{title}; errors of the simulator", columns, rows)
    lines = list(summary(predictions)) if args.whatif else missed
    print("\n".join(lines or ["no target missed"]))
    write_json(args.output / "figures.json", figures)
    (args.output / "table.md").write_text(markdown(columns, rows), encoding="utf-8")
    return 3 if missed else 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
