"""Admission to the queue: bounds, replacement, and shares under pressure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.overload import Admission
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.tiers import Tier, TierQueue, target_shares
from vllm_semantic_sched.policy.overload.account import Amount, Entry, QueueAccount
from vllm_semantic_sched.policy.overload.pressure import PressureLevel
from vllm_semantic_sched.policy.overload.refusal import Code

# Most requests that one new request may replace in a queue bounded in tokens.
_REPLACED_AT_MOST = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new request is admitted or refused.

    Attributes:
        code: why it is refused; None: admitted.
        reason: the same as a sentence.
        replaced: waiting jobs that end in its place.
    """

    code: Code | None = None
    reason: str = ""
    replaced: tuple[Job, ...] = ()


ADMITTED = Verdict()


def admits_all(policy: Policy) -> bool:
    """Whether a policy never refuses a new request, unless another one has the same key."""
    rules = policy.admission
    limits = [rules.tenant.requests, rules.tenant.tokens]
    for queue in (rules.queue, *(tier.queue for tier in policy.all_tiers)):
        limits += [queue.requests, queue.tokens]
    unbounded = all(limit is None for limit in limits)
    return unbounded and rules.over_share == "off" and not policy.shedding.enabled


def ends_requests(policy: Policy) -> bool:
    """Whether a policy may refuse or end any request, by a timeout too."""
    return (
        policy.admission != Admission()
        or policy.shedding.enabled
        or any(policy.tier(level).queue != TierQueue() for level in range(policy.levels))
    )


def fits(
    entry: Entry,
    account: QueueAccount,
    rules: Admission,
    tiers: Sequence[Tier],
    free_seats: int,
) -> Verdict:
    """Whether the queue has room for a new request.

    As many requests as there are free seats are admitted beyond the bounds, because they will not
    wait.
    """
    if account.all.requests < free_seats:
        return ADMITTED
    bound = rules.tenant
    full = _full(account.tenant(entry.tenant), bound.requests, bound.tokens, entry, free_seats)
    if full:
        return Verdict(Code.TENANT_OVER_SHARE, f"This tenant's {full}")
    tier = tiers[entry.level]
    full = _full(
        account.level(entry.level), tier.queue.requests, tier.queue.tokens, entry, free_seats
    )
    if full:
        return Verdict(Code.OVER_CAPACITY, f"Tier {tier.name!r}: the {full}")
    full = _full(account.all, rules.queue.requests, rules.queue.tokens, entry, free_seats)
    if not full:
        return ADMITTED
    replaced = _replaceable(entry, account, rules, free_seats) if rules.replace else ()
    return Verdict(replaced=replaced) if replaced else Verdict(Code.OVER_CAPACITY, f"The {full}")


def over_share(
    level: int,
    outstanding: Sequence[float],
    rules: Admission,
    tiers: Sequence[Tier],
    pressure: PressureLevel,
    random: Random,
) -> Verdict:
    """Refuse a new request if its tier has more than its share under the present pressure.

    Args:
        outstanding: predicted tokens of waiting and running requests, per level.
    """
    total = sum(outstanding)
    if level == 0 or total <= 0:
        return ADMITTED
    share, target = outstanding[level] / total, target_shares(tiers)[level]
    if share <= target:
        return ADMITTED
    certain = rules.over_share == "hard" or pressure is PressureLevel.CRITICAL
    if not certain and target > 0 and random.random() >= share / target - 1.0:
        return ADMITTED
    return Verdict(
        Code.TIER_OVER_SHARE,
        f"Tier {tiers[level].name!r} has {share:.0%} of the work, its share is {target:.0%}",
    )


def _full(
    waiting: Amount, requests: int | None, tokens: int | None, entry: Entry, free_seats: int
) -> str:
    """Which bound a new request exceeds, as text; empty if none."""
    if requests is not None and waiting.requests + 1 > requests + free_seats:
        return f"queue is full: {waiting.requests} requests of {requests}"
    if tokens is not None and waiting.tokens + entry.tokens > tokens:
        return (
            f"queue is full: {waiting.tokens:.0f} predicted tokens and {entry.tokens:.0f} for "
            f"this request of {tokens}"
        )
    return ""


def _replaceable(
    entry: Entry, account: QueueAccount, rules: Admission, free_seats: int
) -> tuple[Job, ...]:
    """The least important jobs to replace so that a new request fits; empty if it never fits."""
    left = Amount(account.all.requests, account.all.tokens)
    replaced: list[Job] = []
    for job, other in account.least_important(entry.level):
        if len(replaced) == _REPLACED_AT_MOST:
            break
        replaced.append(job)
        left.take(other.tokens)
        if not _full(left, rules.queue.requests, rules.queue.tokens, entry, free_seats):
            return tuple(replaced)
    return ()
