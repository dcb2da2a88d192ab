"""Targets of a measurement, and the ratios that `bench run` requires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from vllm_semantic_sched.bench.results import MixResult

MIN_OVERLOAD = 4.0


@dataclass(frozen=True)
class Target:
    """A requirement: `required` is a minimum for `measured` or, with `at_most`, a maximum."""

    text: str
    measured: float
    required: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the target was reached; False for an undefined measurement."""
        if self.at_most:
            return self.measured <= self.required
        return self.measured >= self.required


def missed(targets: Iterable[Target]) -> list[str]:
    """Return a line for each target that was not reached."""
    return [f"target missed: {target.text}" for target in targets if not target.met]


# (mix, scheduler, compared with, metric, statistic, least ratio), all for urgency 0
_URGENT = (
    ("even", "semantic-true", "fcfs", "normalized_waiting", "mean", 10.0),
    ("even", "semantic-true", "priority", "normalized_waiting", "mean", 2.5),
    ("even", "semantic", "fcfs", "normalized_waiting", "mean", 5.0),
    ("rare", "semantic-true", "fcfs", "ttft", "p99", 50.0),
    ("rare", "semantic-true", "priority", "ttft", "p99", 2.5),
)


def check_targets(results: Mapping[str, Mapping[str, MixResult]]) -> list[Target]:
    """Return every target whose mix and schedulers were run.

    Args:
        results: by mix, then by scheduler.
    """
    return [*_urgent(results), *_all_levels(results)]


def _urgent(results: Mapping[str, Mapping[str, MixResult]]) -> Iterator[Target]:
    for mix, name, other, metric, statistic, required in _URGENT:
        rows = results.get(mix, {})
        if name not in rows or other not in rows:
            continue
        ours = getattr(rows[name].levels["0"][metric], statistic)
        theirs = getattr(rows[other].levels["0"][metric], statistic)
        text = f"{mix}: urgency 0, {statistic} {metric}, {other} / {name}"
        yield Target(text, theirs / ours, required)


def _all_levels(results: Mapping[str, Mapping[str, MixResult]]) -> Iterator[Target]:
    for mix, rows in results.items():
        for name, row in rows.items():
            answered = 1 - len(row.failed) / row.requests
            yield Target(f"{mix}: share of requests answered, {name}", answered, 1.0)
            if "fcfs" not in rows or not name.startswith("semantic"):
                continue
            fcfs = rows["fcfs"]
            theirs, ours = (r.levels["all"]["normalized_waiting"].mean for r in (fcfs, row))
            text = f"{mix}: all levels, mean normalized_waiting, fcfs / {name}"
            yield Target(text, theirs / ours, 1.0)
            speed = row.tokens_per_second / fcfs.tokens_per_second
            yield Target(f"{mix}: output tokens per second, {name} / fcfs", speed, 0.97)
        if "fcfs" in rows:
            yield Target(f"{mix}: overload, fcfs", rows["fcfs"].overload, MIN_OVERLOAD)
