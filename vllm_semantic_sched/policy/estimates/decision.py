"""Decides the urgency level from clients' hints and predicted probabilities (Bayes decision)."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.estimates import Hints, MissedCosts
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction

_ROUNDING = 1e-6  # of probabilities that sum to 1

# Probability from which a provisional level may take a seat. A wrong preemption costs a running
# request its KV; the predictor corrects the level within a tenth of a second.
PREEMPT_ABOVE = 0.9

SERVICE_TIER = "service_tier"  # field of the OpenAI API, and key in a request's `vllm_xargs`
NO_SERVICE_TIERS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Hint:
    """The result of a client's hints under the policy."""

    level: int | None  # None if no hint states one or the policy ignores it
    source: LevelSource  # the hint that states it
    problem: str | None = None  # why the urgency hint is unusable, for the log


def decide_level(
    probabilities: Sequence[float],
    decision: Decision,
    costs: MissedCosts | None = None,
) -> int:
    """The level at which to serve a request, by calibrated probabilities; see `Decision`. `costs`:
    of the policy, None: of the decision."""
    last = len(probabilities) - 1
    if len(decision.bounds) != last:
        expected = expected_costs(probabilities, costs or decision)
        return expected.index(min(expected))
    level = _first_to_reach(decision.bounds, probabilities)
    return last if level is None else level


def _first_to_reach(bounds: Iterable[float], probabilities: Sequence[float]) -> int | None:
    """The most urgent level that, with all more urgent ones, is as probable as its bound."""
    shares = itertools.accumulate(probabilities)
    for level, (share, bound) in enumerate(zip(shares, bounds, strict=False)):
        if share >= bound - _ROUNDING:
            return level
    return None


def deciding_rule(job: Job) -> str:
    """What decided a job's level: the source of its level, or `tenant_top`."""
    capped = job.best_level and job.level == job.best_level
    if capped and job.level_source is not LevelSource.OPERATOR:
        return "tenant_top"
    return job.level_source.value


def predicted_level(policy: Policy, prediction: Prediction) -> int:
    """The level of a prediction under a policy, by its model's decision."""
    level = decide_level(prediction.urgency, prediction.decision, policy.decision)
    return min(level, policy.levels - 1)


def reading_level(policy: Policy, hint: Hint, provisional: Prediction | None) -> int:
    """The level by which the HTTP server prepares a request, and a gateway sees it, before the
    predictor has read it."""
    reading = _counted(policy, hint, provisional)
    if reading is not None:
        return predicted_level(policy, reading)
    return policy.default_level if hint.level is None else hint.level


def reading_order(policy: Policy, hint: Hint, provisional: Prediction | None) -> float:
    """The key by which a prompt waits for the predictor, smallest first: the expected cost of
    serving the request last, negated, averaged over the whole text and its most urgent part. Of
    texts with the same provisional level, those that may be or hold an emergency go first."""
    reading = _counted(policy, hint, provisional)
    if reading is not None:
        last = len(reading.urgency) - 1
        whole = expected_cost(reading.urgency, last, policy.decision)
        part = expected_cost(reading.part or reading.urgency, last, policy.decision)
        return -fmean((whole, part))
    level = reading_level(policy, hint, None)
    return -mistake_cost(level, policy.levels - 1, policy.decision)


def _counted(policy: Policy, hint: Hint, provisional: Prediction | None) -> Prediction | None:
    """The provisional reading, if it counts."""
    if hint.level is not None or provisional is None or provisional.unreadable:
        return None
    return provisional if policy.predictor.has_instant_reader else None


def preempting_level(policy: Policy, probabilities: Sequence[float], level: int) -> int | None:
    """The level at which a request of provisional `level` preempts: `level`, or its `sure_level` if
    that is less urgent. None if it may not."""
    sure = rightful_level(policy, probabilities)
    return None if sure is None else max(sure, level)


def rightful_level(policy: Policy, probabilities: Sequence[float]) -> int | None:
    """The most urgent level whose rights a provisional reading gives; None: it gives none."""
    preempts = policy.predictor.instant == "preempt"
    return sure_level(probabilities, PREEMPT_ABOVE) if preempts else None


def sure_level(probabilities: Sequence[float], least: float) -> int | None:
    """The most urgent level that is, with all more urgent ones, at least `least` probable."""
    return _first_to_reach(itertools.repeat(least), probabilities)


def expected_costs(probabilities: Sequence[float], costs: MissedCosts | Decision) -> list[float]:
    """Expected cost of serving at each level, in levels served too early."""
    return [expected_cost(probabilities, level, costs) for level in range(len(probabilities))]


def expected_cost(
    probabilities: Sequence[float], level: int, costs: MissedCosts | Decision
) -> float:
    """The same of one level."""
    mistakes = [
        share * mistake_cost(true, level, costs) for true, share in enumerate(probabilities)
    ]
    return math.fsum(mistakes)


def mistake_cost(true: int, level: int, costs: MissedCosts | Decision) -> float:
    """Cost of serving a request of level `true` at `level`: levels off, weighted by `missed_cost`
    if it is served too late."""
    late = level - true
    if late <= 0:
        return float(-late)
    missed = costs.missed_cost
    return late * missed[min(true, len(missed) - 1)]


class LevelWorth(NamedTuple):
    """Worth of a second by level, over a second of a request of the last level: of one that a
    request loses, and of one that it gains by holds or preemption (`protect.worth`)."""

    lost: tuple[float, ...]
    gained: tuple[float, ...]


def level_worth(policy: Policy) -> LevelWorth:
    """The worth of a second under a policy: `missed_cost` times that of the next level, by default
    72, 6, 1, 1, 1."""
    costs = policy.decision.missed_cost
    lost = [1.0]  # from the last level up
    for level in reversed(range(policy.levels - 1)):
        lost.append(lost[-1] * costs[min(level, len(costs) - 1)])
    lost.reverse()
    factor = (policy.protect.worth or lost[0]) / lost[0]
    return LevelWorth(lost=tuple(lost), gained=tuple(factor * worth for worth in lost))


def read_hints(
    extra_args: Any,
    priority: Any,
    hints: Hints,
    levels: int,
    default_level: int,
    service_tiers: Mapping[str, int] = NO_SERVICE_TIERS,
    tenant: str = "",
) -> Hint:
    """Read an explicit urgency from a request's `vllm_xargs`, else a nonzero priority (vLLM's: 0
    and unset look the same), else a `service_tier`. Clients are untrusted: all may be of any type,
    and nothing is raised. `levels`, `default_level`, `service_tiers`: of the policy. `tenant`:
    whose request it is, empty if unknown; it decides how urgent a level can be claimed."""
    problem = None
    most_urgent = hints.most_urgent_for(tenant)
    if hints.urgency != "ignore" and isinstance(extra_args, dict) and "urgency" in extra_args:
        sent = extra_args["urgency"]
        level = _as_level(sent)
        if level is not None and 0 <= level < levels:
            return Hint(_capped(level, hints.urgency, most_urgent), LevelSource.HINT)
        text = repr(sent)
        if len(text) > 60:
            text = f"{text[:57]}..."
        problem = f"urgency {text} is not a level; valid: 0 to {levels - 1}"
    if hints.priority != "ignore" and isinstance(priority, int) and priority != 0:
        # vLLM's priorities are unbounded: use the nearest level.
        level = default_level + priority if hints.priority == "vllm" else priority
        level = _capped(min(max(level, 0), levels - 1), hints.priority, most_urgent)
        return Hint(level, LevelSource.PRIORITY, problem)
    if service_tiers and isinstance(extra_args, dict):
        service_tier = extra_args.get(SERVICE_TIER)
        if isinstance(service_tier, str) and service_tier in service_tiers:
            level = max(service_tiers[service_tier], most_urgent)
            return Hint(level, LevelSource.SERVICE_TIER, problem)
    return Hint(None, LevelSource.DEFAULT, problem)


def _as_level(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # Headers and form fields arrive as text; int() would also accept "1_0" and other scripts.
    if isinstance(value, str) and len(value) <= 3 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _capped(level: int, mode: str, most_urgent: int) -> int:
    return max(level, most_urgent) if mode == "cap" else level
