"""`semsched bench prediction-latency`: what a slower predictor costs the requests.

Normalized waiting time per urgency level on a real `vllm serve`, with policies that differ only
in when a batch goes to the predictor (at once, or when it is full), in the size of a batch, and
in the seconds added to every batch (paper, section 4.1, tables 1 and 2).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm_semantic_sched.bench.load import LEVELS
from vllm_semantic_sched.bench.options import add_plan_arguments, make_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from vllm_semantic_sched.bench.results import MixResult

_MIX = "even"
_METRIC = "normalized_waiting"
_MODES: tuple[Literal["immediate", "full_batching"], ...] = ("immediate", "full_batching")
_GROUPS = (*(str(level) for level in range(LEVELS)), "all")
_RESULTS, _PICTURE = "prediction_latency.json", "prediction_latency.png"


@dataclass(frozen=True)
class Variant:
    """One setting of the predictor; `added_latency` and `max_wait` in seconds."""

    mode: Literal["immediate", "full_batching"]
    max_batch: int
    max_wait: float
    added_latency: float

    @property
    def name(self) -> str:
        """Tells the variants of a run apart."""
        return f"{self.mode}-batch{self.max_batch}-latency{self.added_latency:g}"

    def policy(self, base: str) -> dict[str, object]:
        """The policy `base`, a name or a path, with this predictor setting.

        Raises:
            PolicyError: there is no such policy, or a value is out of range.
        """
        from vllm_semantic_sched.policy.config import load_policy, parse_policy

        document = load_policy(base).model_dump(mode="json")
        document["predictor"] |= {
            "mode": self.mode,
            "max_batch": self.max_batch,
            "max_wait": self.max_wait,
            "extra_latency": self.added_latency,
        }
        parse_policy(document, self.name)
        return document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench prediction-latency`."""
    # Bursts of up to five, as in the paper's tables; a load small enough for two cores.
    add_plan_arguments(parser, requests=160, max_burst=5, overload=4.0)
    add = parser.add_argument
    add(
        "--vary",
        choices=("latency", "batch", "both"),
        default="latency",
        help="table 1 (latencies), table 2 (batch sizes), or both (%(default)s)",
    )
    add("--latencies", default="0.001,0.01,0.1,1", help="table 1: seconds added (%(default)s)")
    add("--batch", type=int, default=64, help="table 1: largest batch (%(default)s)")
    add("--batches", default="4,16,32,64", help="table 2: largest batches (%(default)s)")
    add("--latency", type=float, default=0.01, help="table 2: seconds added (%(default)s)")
    add(
        "--max-wait",
        type=float,
        default=0.5,
        help="seconds after which full batching sends a batch that is not full (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure every variant, print the table, write JSON and PNG; 1 if a request failed."""
    from vllm_semantic_sched.bench.console import make_console
    from vllm_semantic_sched.bench.report import print_problems

    from vllm_semantic_sched.bench.compare import compare
    from vllm_semantic_sched.bench.schedulers import SchedulerSpec

    chosen = {f"semantic@{variant.name}": variant for variant in variants(args)}
    args.output.mkdir(parents=True, exist_ok=True)
    specs = [
        SchedulerSpec(name, "semantic", str(_write_policy(variant, args.policy, args.output)))
        for name, variant in chosen.items()
    ]
    plan = make_plan(args, specs, [_MIX])
    comparison = compare(plan, vars(args), not args.quiet)
    rows = comparison.mixes[_MIX]
    results = [(variant, rows[name]) for name, variant in chosen.items()]
    console = make_console()
    console.print(table(results))
    (args.output / _RESULTS).write_text(json.dumps(document(results), indent=1) + "\n")
    draw(results, args.output / _PICTURE)
    console.print(f"figures: {args.output / _RESULTS}", soft_wrap=True)
    console.print(f"picture: {args.output / _PICTURE}", soft_wrap=True)
    return print_problems(console, comparison.failures())


def variants(args: argparse.Namespace) -> list[Variant]:
    """The settings to compare, each once.

    Raises:
        ValueError: a list holds something else than numbers.
    """
    return list(dict.fromkeys(_variants(args)))


def _variants(args: argparse.Namespace) -> Iterator[Variant]:
    latencies = [float(part) for part in args.latencies.split(",")]
    batches = [int(part) for part in args.batches.split(",")]
    for mode in _MODES:
        if args.vary in ("latency", "both"):
            for latency in latencies:
                yield Variant(mode, args.batch, args.max_wait, latency)
        if args.vary in ("batch", "both"):
            for batch in batches:
                yield Variant(mode, batch, args.max_wait, args.latency)


def _write_policy(variant: Variant, base: str, folder: Path) -> Path:
    import yaml

    path = folder / f"policy-{variant.name}.yaml"
    path.write_text(yaml.safe_dump(variant.policy(base), sort_keys=False))
    return path


def table(results: Sequence[tuple[Variant, MixResult]]) -> Table:
    """Mean normalized waiting time, a row per variant and a column per level."""
    from rich import box
    from rich.table import Table

    made = Table(title="mean normalized waiting time, ms per output token", box=box.SIMPLE)
    made.add_column("predictor")
    for column in ("largest batch", "added latency, s"):
        made.add_column(column, justify="right")
    for group in _GROUPS:
        made.add_column("all" if group == "all" else f"urgency {group}", justify="right")
    made.add_column("output tok/s", justify="right")
    for variant, row in results:
        means = (f"{1e3 * _mean(row, group):.1f}" for group in _GROUPS)
        made.add_row(
            variant.mode.replace("_", " "),
            str(variant.max_batch),
            f"{variant.added_latency:g}",
            *means,
            f"{row.tokens_per_second:.0f}",
        )
    return made


def document(results: Sequence[tuple[Variant, MixResult]]) -> dict[str, object]:
    """What `prediction_latency.json` holds; times in seconds."""
    from vllm_semantic_sched.bench.results import environment

    return {
        "environment": environment(),
        "variants": [
            {
                **asdict(variant),
                "tokens_per_second": row.tokens_per_second,
                "latest_send": row.latest_send,
                "failed": len(row.failed),
                _METRIC: {
                    group: asdict(row.levels[group][_METRIC])
                    for group in _GROUPS
                    if group in row.levels
                },
            }
            for variant, row in results
        ],
    }


def draw(results: Sequence[tuple[Variant, MixResult]], path: Path) -> None:
    """Write a PNG: one panel for each quantity that was varied and each mode, a line per level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(_panels(results))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.2), squeeze=False, sharey=True
    )
    for axis, (title, label, points) in zip(axes[0], panels, strict=True):
        _lines(axis, points)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel(label)
    axes[0][0].set_ylabel("mean normalized waiting time [ms/token]")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _panels(
    results: Sequence[tuple[Variant, MixResult]],
) -> Iterator[tuple[str, str, list[tuple[float, MixResult]]]]:
    """Title, axis label and points of each panel: along one quantity, the other as it is most."""
    for field, label in (("added_latency", "added latency [s]"), ("max_batch", "largest batch")):
        other = "max_batch" if field == "added_latency" else "added_latency"
        for mode in _MODES:
            rows = [(variant, row) for variant, row in results if variant.mode == mode]
            fixed = {getattr(variant, other) for variant, _ in rows}
            lines = [
                [
                    (getattr(variant, field), row)
                    for variant, row in rows
                    if getattr(variant, other) == value
                ]
                for value in sorted(fixed)
            ]
            longest = max(lines, key=len)
            if len(longest) > 1:
                yield mode.replace("_", " "), label, sorted(longest, key=lambda point: point[0])


def _lines(axis: Axes, points: Sequence[tuple[float, MixResult]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    places = [place for place, _ in points]
    for group in _GROUPS:
        heights = [1e3 * _mean(row, group) for _, row in points]
        label, style = ("all", "k--") if group == "all" else (f"urgency {group}", "o-")
        axis.plot(places, heights, style, label=label, markersize=4)
    axis.set_yscale("log")
    if min(places) > 0:
        axis.set_xscale("log")
    axis.set_xticks(places)
    # All the values may lie within one decade, where a log axis would have no number.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:g}")
        scale.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _mean(row: MixResult, group: str) -> float:
    return row.levels[group][_METRIC].mean if group in row.levels else float("nan")
