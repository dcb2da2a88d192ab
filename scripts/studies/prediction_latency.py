"""Cost of a slower predictor to the requests (paper, section 4.1, tables 1 and 2).

Measures the normalized waiting time per urgency level on a real `vllm serve`, with policies that
differ only in when a batch goes to the predictor (at once, or when it is full), in the size of a
batch, and in the seconds added to every batch. Prints a table and writes a JSON file and a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from common import main, write_json

from vllm_semantic_sched.cli.console import make_console
from vllm_semantic_sched.lab.bench import command_line
from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.lab.bench.compare import compare
from vllm_semantic_sched.lab.bench.results import environment
from vllm_semantic_sched.lab.bench.schedulers import SchedulerSpec
from vllm_semantic_sched.lab.bench.workload import LEVELS
from vllm_semantic_sched.lab.report.tables import make_table
from vllm_semantic_sched.policy.config import load_policy, parse_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

    from vllm_semantic_sched.lab.bench.results import MixResult

_MIX = "even"
_METRIC = "normalized_waiting"
_MODES: tuple[Literal["immediate", "full_batching"], ...] = ("immediate", "full_batching")
_GROUPS = (*(str(level) for level in range(LEVELS)), "all")
_RESULTS = "prediction_latency.json"
_PICTURE = "prediction_latency.png"


@dataclass(frozen=True)
class Variant:
    """One setting of the predictor; `added_latency` and `max_wait` in seconds."""

    mode: Literal["immediate", "full_batching"]
    max_batch: int
    max_wait: float
    added_latency: float
    instant: bool = True

    @property
    def name(self) -> str:
        """Name of the variant, unique within a run."""
        return f"{self.mode}-batch{self.max_batch}-latency{self.added_latency:g}"

    def policy(self, base: str) -> dict[str, object]:
        """Return the policy `base`, a name or a path, with this predictor setting.

        Raises:
            PolicyError: the policy does not exist, or a value is out of range.
        """
        document = load_policy(base).model_dump(mode="json")
        document["predictor"]["instant"]["enabled"] = self.instant
        document["predictor"] |= {
            "mode": self.mode,
            "max_batch": self.max_batch,
            "max_wait": self.max_wait,
            "extra_latency": self.added_latency,
        }
        parse_policy(document, self.name)
        return document


def variants(args: argparse.Namespace) -> list[Variant]:
    """Return the settings to compare, each once.

    Raises:
        ValueError: a list contains something other than numbers.
    """
    return list(dict.fromkeys(_variants(args)))


def _variants(args: argparse.Namespace) -> Iterator[Variant]:
    latencies = [float(part) for part in args.latencies.split(",")]
    batches = [int(part) for part in args.batches.split(",")]
    for mode in _MODES:
        if args.vary in ("latency", "both"):
            for latency in latencies:
                yield Variant(mode, args.batch, args.max_wait, latency, not args.no_instant)
        if args.vary in ("batch", "both"):
            for batch in batches:
                yield Variant(mode, batch, args.max_wait, args.latency, not args.no_instant)


def _write_policy(variant: Variant, base: str, folder: Path) -> Path:
    path = folder / f"policy-{variant.name}.yaml"
    path.write_text(yaml.safe_dump(variant.policy(base), sort_keys=False))
    return path


def table(results: Sequence[tuple[Variant, MixResult]]) -> Table:
    """Return the mean normalized waiting times: a row per variant, a column per level."""
    groups = ("all" if group == "all" else f"urgency {group}" for group in _GROUPS)
    made = make_table(
        "mean normalized waiting time, ms per output token",
        "predictor",
        "largest batch",
        "added latency, s",
        *groups,
        "output tok/s",
    )
    for variant, row in results:
        means = (f"{1e3 * _mean(row, group):.1f}" for group in _GROUPS)
        made.add_row(
            variant.mode.replace("_", " "),
            str(variant.max_batch),
            f"{variant.added_latency:g}",
            *means,
            f"{row.best.tokens_per_second:.0f}",
        )
    return made


def document(results: Sequence[tuple[Variant, MixResult]]) -> dict[str, object]:
    """Return the contents of `prediction_latency.json`; times in seconds."""
    return {
        "environment": environment(),
        "variants": [
            {
                **asdict(variant),
                "tokens_per_second": row.best.tokens_per_second,
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
    """Write a PNG: a panel for each varied quantity and mode, a line per level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(panels_of(results))
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


def panels_of(
    results: Sequence[tuple[Variant, MixResult]],
) -> Iterator[tuple[str, str, list[tuple[float, MixResult]]]]:
    """Yield title, axis label and points of each panel.

    The points vary one quantity; the other one has the value with the most points.
    """
    for field, label in (("added_latency", "added latency [s]"), ("max_batch", "largest batch")):
        fixed_field = "max_batch" if field == "added_latency" else "added_latency"
        for mode in _MODES:
            rows = [(variant, row) for variant, row in results if variant.mode == mode]
            fixed = {getattr(variant, fixed_field) for variant, _ in rows}
            lines = [
                [
                    (getattr(variant, field), row)
                    for variant, row in rows
                    if getattr(variant, fixed_field) == value
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
        if group == "all":
            axis.plot(places, heights, "k--", label="all", markersize=4)
        else:
            axis.plot(places, heights, "o-", label=f"urgency {group}", markersize=4)
    axis.set_yscale("log")
    if min(places) > 0:
        axis.set_xscale("log")
    axis.set_xticks(places)
    # All values may lie within one decade, where a log axis would have no label.
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter("{x:g}")
        scale.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _mean(row: MixResult, group: str) -> float:
    return row.levels[group][_METRIC].mean if group in row.levels else float("nan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    # Bursts of up to five, as in the paper's tables; a load small enough for two cores.
    command_line.add_plan_arguments(parser, requests=160, max_burst=5, overload=4.0)
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
        "--no-instant",
        action="store_true",
        help="without the instant reader, as in the paper: requests wait for the predictor",
    )
    add(
        "--max-wait",
        type=float,
        default=0.5,
        help="seconds after which full batching sends a batch that is not full (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure every variant, print the table, write JSON and PNG; 1 if a request failed."""
    chosen = {f"semantic@{variant.name}": variant for variant in variants(args)}
    specs = [
        SchedulerSpec(name, "semantic", str(_write_policy(variant, args.policy, args.output)))
        for name, variant in chosen.items()
    ]
    plan = command_line.make_plan(args, specs, [_MIX])
    result = compare(plan, vars(args), Progress(not args.quiet))
    results = [(variant, result.mixes[_MIX][name]) for name, variant in chosen.items()]
    console = make_console()
    console.print(table(results))
    write_json(args.output / _RESULTS, document(results))
    draw(results, args.output / _PICTURE)
    console.print(f"figures: {args.output / _RESULTS}", soft_wrap=True)
    console.print(f"picture: {args.output / _PICTURE}", soft_wrap=True)
    return command_line.print_problems(console, result.failures())


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
