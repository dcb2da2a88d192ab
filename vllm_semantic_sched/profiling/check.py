"""How well a profile predicts what preempting a request costs, measured anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_semantic_sched.policy.estimates.profile import EngineProfile
from vllm_semantic_sched.policy.eviction.retention import HostRoom, Retention, plan_preemption
from vllm_semantic_sched.policy.job import Job, LevelSource
from vllm_semantic_sched.profiling.fit import reduce_seconds
from vllm_semantic_sched.profiling.live_engine import LiveEngine

PROMPTS = (60, 120, 250, 500, 1000, 1900, 3800, 7600)
GENERATED = (10, 50, 150, 400)

MEDIAN_TARGET, P90_TARGET, CHOICE_TARGET = 0.15, 0.30, 0.95
_GOOD_ENOUGH = 1.1  # a choice is right if it takes at most this many times the better plan's time
# Where copies are cheap next to computing, every profile chooses well. Slowed down alike in
# prediction and measurement, they show how well it would choose elsewhere.
SLOWDOWNS = tuple(round(10 ** (exponent / 10), 3) for exponent in range(41))


@dataclass(frozen=True)
class Point:
    """A victim: seconds to compute its tokens again, and to save and load their KV."""

    prompt: int
    generated: int
    recompute: float
    swap: float
    predicted_recompute: float
    predicted_swap: float

    def chooses_well(self, profile: EngineProfile, slowdown: float = 1.0) -> bool:
        """Whether the policy's plan takes at most 1.1 times the better one's time, with copies
        that much slower. Both times are until the next token: a prefill brings it along, after
        a load one more step does."""
        job = Job("", 0, 0.0, self.prompt, self.generated, 0, LevelSource.DEFAULT)
        job.computed = self.prompt + self.generated
        room = HostRoom(block_size=1, blocks=job.computed)
        plan = plan_preemption(job, profile.scaled(1.0, 1.0, slowdown), Retention(), room)
        swap = self.swap * slowdown + profile.gamma2
        chosen = swap if plan.saved > plan.recomputed else self.recompute
        return chosen <= _GOOD_ENOUGH * min(swap, self.recompute)


@dataclass(frozen=True)
class Verdict:
    """Median and 90th percentile of |predicted - measured| / measured; shares of points where the
    plan chosen was good: as it is, and at the slowdown of copies where it was worst."""

    recompute: tuple[float, float]
    swap: tuple[float, float]
    choice: float
    worst_choice: float
    worst_slowdown: float

    @property
    def met(self) -> bool:
        """Whether the targets are met."""
        errors = (self.recompute, self.swap)
        return (
            all(median <= MEDIAN_TARGET and p90 <= P90_TARGET for median, p90 in errors)
            and self.choice >= CHOICE_TARGET
        )


def make_points(longest: int) -> list[tuple[int, int]]:
    """Pairs of prompt and generated tokens, together at most `longest`."""
    return [
        (prompt, generated)
        for prompt in PROMPTS
        for generated in GENERATED
        if prompt + generated <= longest
    ]


def check(
    engine: LiveEngine,
    profile: EngineProfile,
    pairs: Sequence[tuple[int, int]],
    repeats: int,
    statistic: str,
    seed: int = 1,
) -> Iterator[list[Point] | None]:
    """Measure victims: the prefill of prompt and generated tokens in one pass, as vLLM does after
    a preemption, and the copies of their KV.

    Yields:
        None after each point, at last the points.
    """
    random = np.random.default_rng(seed)
    seconds: list[list[float]] = [[] for _ in pairs]
    engine.run([pairs[0][0]], 4)
    engine.run([min(sum(pairs[-1]), engine.token_budget)], 1)
    for _ in range(repeats):
        for place in random.permutation(len(pairs)):
            steps = engine.run([sum(pairs[place])], 1)
            seconds[place].append(sum(step.seconds for step in steps))
            yield None
    copies = engine.copy([sum(pair) for pair in pairs], max(3, 2 * repeats), seed)
    points = []
    for (prompt, generated), recompute, save, load in zip(
        pairs, seconds, copies.save, copies.load, strict=True
    ):
        tokens = prompt + generated
        whole_blocks = -(-tokens // engine.block_size) * engine.block_size
        points.append(
            Point(
                prompt,
                generated,
                recompute=reduce_seconds(recompute, statistic),
                swap=reduce_seconds(save, statistic) + reduce_seconds(load, statistic),
                predicted_recompute=profile.prefill_alone(tokens, engine.token_budget),
                predicted_swap=profile.save(whole_blocks) + profile.load(whole_blocks),
            )
        )
    yield points


def judge(profile: EngineProfile, points: Sequence[Point]) -> Verdict:
    """Errors and choices over all points."""
    shares = {
        slowdown: float(np.mean([point.chooses_well(profile, slowdown) for point in points]))
        for slowdown in SLOWDOWNS
    }
    worst = min(SLOWDOWNS, key=lambda slowdown: shares[slowdown])
    return Verdict(
        recompute=_errors([(point.predicted_recompute, point.recompute) for point in points]),
        swap=_errors([(point.predicted_swap, point.swap) for point in points]),
        choice=shares[1.0],
        worst_choice=shares[worst],
        worst_slowdown=worst,
    )


def _errors(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    sizes = [abs(predicted - measured) / measured for predicted, measured in pairs]
    return float(np.median(sizes)), float(np.percentile(sizes, 90))


def report(profile: EngineProfile, points: Sequence[Point], verdict: Verdict) -> dict[str, Any]:
    """Everything as a JSON document."""
    return {
        "profile": {"model": profile.model, "hardware": profile.hardware},
        "verdict": asdict(verdict) | {"met": verdict.met},
        "points": [asdict(point) for point in points],
    }


def print_points(points: Sequence[Point], verdict: Verdict) -> None:
    """The points as a table, and the verdict below it."""
    from rich import box
    from rich.table import Table

    from vllm_semantic_sched.cli.console import make_console

    table = Table(box=box.SIMPLE)
    for column in ("prompt", "generated", "recompute ms", "predicted", "swap ms", "predicted"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            str(point.prompt),
            str(point.generated),
            _cell(point.recompute),
            _cell(point.predicted_recompute, point.recompute),
            _cell(point.swap),
            _cell(point.predicted_swap, point.swap),
        )
    console = make_console()
    console.print(table)
    for name, (median, p90) in (("recompute", verdict.recompute), ("swap", verdict.swap)):
        console.print(
            f"{name}: error median {median:.1%} (target {MEDIAN_TARGET:.0%}), "
            f"p90 {p90:.1%} (target {P90_TARGET:.0%}), {len(points)} points"
        )
    console.print(
        f"plan chosen is the cheaper one, or within {_GOOD_ENOUGH - 1:.0%} of it: "
        f"{verdict.choice:.1%} (target {CHOICE_TARGET:.0%}); with copies 1 to "
        f"{SLOWDOWNS[-1]:,.0f} times slower at least {verdict.worst_choice:.1%}"
    )


def _cell(seconds: float, measured: float | None = None) -> str:
    if measured is None:
        return f"{seconds * 1e3:.2f}"
    return f"{seconds * 1e3:.2f} ({seconds / measured - 1:+.0%})"
