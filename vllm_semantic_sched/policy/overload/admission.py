"""Admission to the queue: bounds, replacement, and shares under pressure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.overload import Admission
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.tiers import Tier, TierQueue, target_shares
from vllm_semantic_sched.policy.overload.account import Entry, QueueAccount
from vllm_semantic_sched.policy.overload.pressure import PressureLevel
from vllm_semantic_sched.policy.overload.refusal import Code

# Probability of a refusal over share: by the excess, and at most (S6).
_REFUSALS_PER_EXCESS, _MOST_REFUSALS = 5.0, 0.8


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new request is admitted or refused."""

    code: Code | None = None  # why it is refused; None: admitted
    reason: str = ""  # the same as a sentence
    replaced: Job | None = None  # a waiting job that ends in its place


ADMITTED = Verdict()


def admits_all(policy: Policy) -> bool:
    """Whether a policy never refuses a new request."""
    rules = policy.admission
    bounds = [rules.tenant.requests, rules.queue.requests]
    bounds += [tier.queue.requests for tier in policy.all_tiers]
    unbounded = all(bound is None for bound in bounds)
    return unbounded and rules.over_share == "off" and not policy.shedding.enabled


def ends_requests(policy: Policy) -> bool:
    """Whether a policy may refuse or end any request, by a timeout too."""
    return (
        policy.admission != Admission()
        or policy.shedding.enabled
        or any(tier.queue != TierQueue() for tier in policy.all_tiers)
    )


def fits(
    entry: Entry,
    account: QueueAccount,
    rules: Admission,
    tiers: Sequence[Tier],
    free_seats: int,
) -> Verdict:
    """Whether the queue has room for a new request. As many requests as there are free seats are
    admitted beyond the bounds, because they will not wait."""
    if account.all.requests < free_seats:
        return ADMITTED
    tenant, tier = account.tenant(entry.tenant), tiers[entry.level]
    level = account.level(entry.level)
    for code, whose, waiting, most in (
        (Code.TENANT_OVER_SHARE, "This tenant's", tenant, rules.tenant.requests),
        (Code.OVER_CAPACITY, f"Tier {tier.name!r}: the", level, tier.queue.requests),
        (Code.OVER_CAPACITY, "The", account.all, rules.queue.requests),
    ):
        if most is not None and waiting.requests >= most + free_seats:
            replaced = account.least_important(entry.level) if waiting is account.all else None
            if replaced is not None:
                return Verdict(replaced=replaced)
            return Verdict(code, f"{whose} queue is full: {waiting.requests} requests of {most}")
    return ADMITTED


def over_share(
    level: int,
    outstanding: Sequence[float],
    rules: Admission,
    tiers: Sequence[Tier],
    pressure: PressureLevel,
    random: Random,
) -> Verdict:
    """Refuse a new request if its tier has more than its share of the predicted tokens, given per
    level as `outstanding`. Shares that tiers without requests do not use go to the others."""
    total = sum(outstanding)
    if level == 0 or not outstanding[level]:
        return ADMITTED
    targets = target_shares(tiers)
    wanted = sum(target for target, tokens in zip(targets, outstanding, strict=True) if tokens)
    share, target = outstanding[level] / total, targets[level] / wanted if wanted else 0.0
    if share <= target:
        return ADMITTED
    certain = rules.over_share == "hard" or pressure is PressureLevel.CRITICAL
    probability = min(_REFUSALS_PER_EXCESS * (share - target), _MOST_REFUSALS)
    if not certain and random.random() >= probability:
        return ADMITTED
    return Verdict(
        Code.TIER_OVER_SHARE,
        f"Tier {tiers[level].name!r} has {share:.0%} of the work, its share is {target:.0%}",
    )
