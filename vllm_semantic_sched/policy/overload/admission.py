"""Admission to the queue: bounds, replacement, and shares under pressure."""

from dataclasses import dataclass
from random import Random

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.overload import Admission
from vllm_semantic_sched.policy.config.tiers import TierQueue
from vllm_semantic_sched.policy.facts.capacity import Allocation
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.limits import Scope
from vllm_semantic_sched.policy.order.fair_share import shares_of
from vllm_semantic_sched.policy.overload.account import Entry
from vllm_semantic_sched.policy.overload.load import LoadMonitor, PressureLevel
from vllm_semantic_sched.policy.overload.refusal import Code

# Probability of a refusal over share: by the excess, and at most (S6).
_REFUSALS_PER_EXCESS, _MOST_REFUSALS = 5.0, 0.8

SHED = "Tier {tier!r} is shed until more urgent tiers meet their targets again"


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
    may_refuse = policy.shedding.enabled or policy.deadlines.stated
    return unbounded and rules.over_share == "off" and not may_refuse


def ends_requests(policy: Policy) -> bool:
    """Whether a policy may refuse or end any request, by a timeout too."""
    return (
        policy.admission != Admission()
        or policy.shedding.enabled
        or policy.deadlines.stated
        or any(tier.queue != TierQueue() for tier in policy.all_tiers)
    )


def judge(
    entry: Entry, load: LoadMonitor, policy: Policy, free_seats: int, random: Random
) -> Verdict:
    """Whether a new request is admitted. As many requests as there are free seats are admitted
    beyond the bounds on the queue, because they will not wait."""
    level, tier, allocations = entry.level, load.tiers[entry.level], load.allocations
    if load.is_shed(level):
        return Verdict(Code.SHED, SHED.format(tier=tier.name))
    if policy.admission.over_share != "off" and load.pressure.level:
        reason = _over_share(level, load, policy, random)
        if reason is not None:
            return Verdict(Code.TIER_OVER_SHARE, reason)
    if allocations.all.queued < free_seats:
        return ADMITTED
    limits = load.limits.table
    tenant = allocations.tenants.get(entry.tenant) or Allocation()
    for limit, held, whose in (
        (limits.tenant, tenant, "This tenant's"),
        (limits.tiers[level], allocations.levels[level], f"Tier {tier.name!r}: the"),
        (limits.all, allocations.all, "The"),
    ):
        if held.queued >= limit.queued + free_seats:
            if limit.scope is Scope.ALL and (worst := load.account.least_important(level)):
                return Verdict(replaced=worst)
            of_tenant = limit.scope is Scope.TENANT
            code = Code.TENANT_OVER_SHARE if of_tenant else Code.OVER_CAPACITY
            reason = f"{whose} queue is full: at most {limit.queued} requests may wait"
            return Verdict(code, reason)
    return ADMITTED


def _over_share(level: int, load: LoadMonitor, policy: Policy, random: Random) -> str | None:
    """Why a new request is refused because its tier has more than its share of the predicted work;
    None if it is not. Shares that tiers without requests do not use go to the others."""
    work = load.outstanding()
    active = [place for place, tokens in enumerate(work) if tokens]
    share = shares_of(work, policy.target_shares, active).get(level)
    if level == 0 or share is None or share.actual <= share.due:
        return None
    certain = policy.admission.over_share == "hard" or load.pressure.level is PressureLevel.CRITICAL
    excess = share.actual - share.due
    probability = min(_REFUSALS_PER_EXCESS * excess, _MOST_REFUSALS)
    if not certain and random.random() >= probability:
        return None
    tier = load.tiers[level].name
    return f"Tier {tier!r} has {share.actual:.0%} of the work, its share is {share.due:.0%}"
