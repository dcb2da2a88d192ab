"""Targets of a measurement, and the ratios that `bench run` requires."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from vllm_semantic_sched.lab.bench.metrics import mean_waiting
from vllm_semantic_sched.lab.bench.results import Rows
from vllm_semantic_sched.lab.bench.workload import LEVELS

_TRUE, _TEXT, _KNOWN = "semantic-true", "semantic", "semantic-known"
_ALL = range(LEVELS)
# mix, levels, faster scheduler, other one, least ratio of their mean normalized waiting times
_WAITING = (
    ("rare", (0,), _TRUE, "priority", 1.25),
    ("even", (0,), _TRUE, "priority", 2.5),
    ("even", (0,), _TRUE, "fcfs", 10.0),
    ("even", (0,), _TEXT, "fcfs", 8.0),
    ("even", _ALL, _TRUE, "fcfs", 1.3),
    ("rare", _ALL, _TRUE, "fcfs", 1.3),
    ("even", _ALL, _KNOWN, "fcfs", 1.6),
    ("rare", _ALL, _KNOWN, "fcfs", 1.6),
)


@dataclass(frozen=True)
class Target:
    """A requirement: `required` is a minimum for `measured` or, with `at_most`, a maximum."""

    text: str
    measured: float
    required: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """False for an undefined measurement."""
        return self.measured <= self.required if self.at_most else self.measured >= self.required


def missed(targets: Iterable[Target]) -> list[str]:
    """Return a line for each target that was not reached."""
    return [f"target missed: {target.text}" for target in targets if not target.met]


def check_targets(results: Mapping[str, Rows]) -> list[Target]:
    """Return every target whose mix and schedulers were run; `results` are by mix."""
    return [
        replace(one, text=f"{mix}: {one.text}")
        for mix, rows in results.items()
        for check in (_conditions, _waiting, _idle_speed, _cost_of_holds)
        for one in check(mix, rows)
    ]


def _conditions(mix: str, rows: Rows) -> Iterator[Target]:
    """The load for which the other targets are meant."""
    for name, row in rows.items():
        answered = 1 - len(row.failed) / row.requests
        yield Target(f"share of requests answered, {name}", answered, 1.0)
    first = next(iter(rows.values()))
    yield Target(f"overload, {first.scheduler.name}", first.overload, 5.0)
    yield Target("requests", len(first.workload.requests), 400)
    rounds = min(len({done.number for done in row.rounds}) for row in rows.values())
    yield Target("rounds of every scheduler", rounds, 2)


def _waiting(mix: str, rows: Rows) -> Iterator[Target]:
    for wanted, levels, name, other, required in _WAITING:
        if wanted == mix and name in rows and other in rows:
            slow, fast = (mean_waiting(rows[one].records, levels) for one in (other, name))
            scope = "all levels" if len(levels) == LEVELS else "urgency 0"
            yield Target(f"{scope}, norm. waiting, {other} / {name}", slow / fast, required)


def _idle_speed(mix: str, rows: Rows) -> Iterator[Target]:
    """Urgent requests run as fast as on an idle engine, however many others wait."""
    true = rows.get(_TRUE)
    if true is None or mix != "rare":
        return
    text = f"urgency 0, norm. waiting, {_TRUE} / idle engine"
    yield Target(text, true.best.idle_ratio, 1.2, at_most=True)
    if "0" in true.idle_levels:
        ratio = true.p99_ttft() / true.idle_levels["0"]["ttft"].p99
        text = f"urgency 0, p99 TTFT, {_TRUE} / idle engine"
        yield Target(text, ratio, 4.0, at_most=True)
    if _TEXT in rows:
        ratio = rows[_TEXT].p99_ttft(without=rows[_TEXT].misread) / true.p99_ttft()
        text = f"urgency 0 without misread, p99 TTFT, {_TEXT} / {_TRUE}"
        yield Target(text, ratio, 1.5, at_most=True)


def _cost_of_holds(mix: str, rows: Rows) -> Iterator[Target]:
    """What the scheduler costs without holds, and what holds cost the less urgent."""
    plain = next((row for row in rows.values() if row.scheduler.variant == "no-holds"), None)
    if plain is None:
        return
    name = plain.scheduler.name
    if "fcfs" in rows:
        ours, theirs = (row.best.engine_seconds_per_1000 for row in (plain, rows["fcfs"]))
        text = f"EngineCore CPU per output token, {name} / fcfs"
        yield Target(text, ours / theirs, 1.03, at_most=True)
    holding = rows.get(plain.scheduler.kind)
    if holding is not None:
        ours, theirs = (mean_waiting(row.records, range(1, LEVELS)) for row in (holding, plain))
        text = f"urgency 1 to 4, norm. waiting, {holding.scheduler.name} / {name}"
        yield Target(text, ours / theirs, 1.05, at_most=True)
