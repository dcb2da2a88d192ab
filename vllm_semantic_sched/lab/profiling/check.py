"""Measures what preempting a request costs, and compares it with a profile's predictions."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_semantic_sched.lab.profiling.fit import reduce_seconds
from vllm_semantic_sched.lab.profiling.live_engine import LiveEngine
from vllm_semantic_sched.lab.profiling.measure import Repeats, run_repeats
from vllm_semantic_sched.policy.config.eviction import Retention
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.policy.retention import HostRoom, plan_preemption

PROMPTS = (60, 120, 250, 500, 1000, 1900, 3800, 7600)
GENERATED = (10, 50, 150, 400)

MEDIAN_TARGET = 0.15
"""Largest median error."""
P90_TARGET = 0.30
"""Largest 90th percentile of the errors."""
CHOICE_TARGET = 0.95
"""Smallest share of good choices."""
GOOD_CHOICE = 1.1
"""A choice is good if it takes at most this many times as long as the best plan."""

# Where copies are cheap, every profile chooses well. Slower ones, predicted and measured alike,
# show how well it would choose on other machines.
SLOWDOWNS = tuple(round(10 ** (exponent / 10), 3) for exponent in range(41))


class Point(NamedTuple):
    """A preempted request: seconds to recompute its tokens, and to save and load their KV."""

    prompt: int
    generated: int
    recompute: float
    swap: float
    predicted_recompute: float
    predicted_swap: float

    def chooses_well(self, profile: EngineProfile, slowdown: float = 1.0) -> bool:
        """Whether the policy chooses well between recompute and swap (`GOOD_CHOICE`) with copies
        `slowdown` times as slow, by the time until the next token: a prefill yields it at once, a
        load needs one more step."""
        job = Job("", 0, 0.0, self.prompt, self.generated, 0, LevelSource.DEFAULT)
        held = self.prompt + self.generated
        room = HostRoom(block_size=1, blocks=held)
        plan = plan_preemption(job, held, profile.scaled(1.0, 1.0, slowdown), Retention(), room)
        swap = self.swap * slowdown + profile.gamma2
        chosen = swap if plan.saved > plan.recomputed else self.recompute
        return chosen <= GOOD_CHOICE * min(swap, self.recompute)


class Verdict(NamedTuple):
    """Median and 90th percentile of |predicted - measured| / measured by kind; the share of points
    where the policy chooses well, and the smallest over all `SLOWDOWNS`."""

    recompute: tuple[float, float]
    swap: tuple[float, float]
    choice: float
    worst_choice: float
    worst_slowdown: float

    @property
    def met(self) -> bool:
        """Whether all targets are met; `worst_choice` has none."""
        for median, p90 in (self.recompute, self.swap):
            if median > MEDIAN_TARGET or p90 > P90_TARGET:
                return False
        return self.choice >= CHOICE_TARGET


def make_lengths(longest: int) -> list[tuple[int, int]]:
    """Pairs of prompt and generated tokens with at most `longest` tokens together."""
    return [pair for pair in itertools.product(PROMPTS, GENERATED) if sum(pair) <= longest]


def measure_points(
    engine: LiveEngine, profile: EngineProfile, lengths: Sequence[tuple[int, int]], repeats: Repeats
) -> list[Point]:
    """Measure the prefill of prompt and generated tokens in one pass, as vLLM does after a
    preemption, and the copies of their KV."""
    totals = [sum(pair) for pair in lengths]
    engine.run([lengths[0][0]], 4)
    engine.run([min(totals[-1], engine.token_budget)], 1)
    runs = run_repeats(engine, [([total], 1) for total in totals], repeats)
    seconds = [[sum(step.seconds for step in steps) for steps in point] for point in runs]
    copies = engine.copy(totals, max(3, 2 * repeats.number), repeats.seed)

    points = []
    for pair, recomputes, saves, loads in zip(
        lengths, seconds, copies.save, copies.load, strict=True
    ):
        prompt, generated = pair
        tokens = prompt + generated
        whole_blocks = -(-tokens // engine.block_size) * engine.block_size
        save = reduce_seconds(saves, repeats.statistic)
        load = reduce_seconds(loads, repeats.statistic)
        point = Point(
            prompt=prompt,
            generated=generated,
            recompute=reduce_seconds(recomputes, repeats.statistic),
            swap=save + load,
            predicted_recompute=profile.prefill_alone(tokens, engine.token_budget),
            predicted_swap=profile.save(whole_blocks) + profile.load(whole_blocks),
        )
        points.append(point)
    return points


def judge(profile: EngineProfile, points: Sequence[Point]) -> Verdict:
    """Errors of the predictions at these points, and how well the policy chooses there."""
    shares = {
        slowdown: float(np.mean([point.chooses_well(profile, slowdown) for point in points]))
        for slowdown in SLOWDOWNS
    }
    worst = min(SLOWDOWNS, key=shares.__getitem__)

    def errors(kind: str) -> tuple[float, float]:
        measured = np.array([getattr(point, kind) for point in points])
        predicted = np.array([getattr(point, f"predicted_{kind}") for point in points])
        median, p90 = np.percentile(abs(predicted - measured) / measured, (50, 90))
        return float(median), float(p90)

    return Verdict(
        recompute=errors("recompute"),
        swap=errors("swap"),
        choice=shares[1.0],
        worst_choice=shares[worst],
        worst_slowdown=worst,
    )


def report(profile: EngineProfile, points: Sequence[Point], verdict: Verdict) -> dict[str, Any]:
    """Verdict and points as a JSON document."""
    return {
        "profile": {"model": profile.model, "hardware": profile.hardware},
        "verdict": verdict._asdict() | {"met": verdict.met},
        "points": [point._asdict() for point in points],
    }
