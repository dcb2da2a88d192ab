"""The policy file (YAML): every key with its type, default and description."""

from __future__ import annotations

import operator
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from vllm_semantic_sched.policy.config import estimates, eviction, order, overload
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.removed import take_removed
from vllm_semantic_sched.policy.config.section import PolicyError, Section, parse_section
from vllm_semantic_sched.policy.config.tiers import Tier

AUTO = "auto"  # the profile derived from the engine's model and device

_LEVEL_KEYS = ("default_level", "hints.most_urgent_level", "protect.level")
# Keys that say something about requests in vLLM's own order, too.
_FCFS_KEYS = frozenset({"base", "levels", "tiers", "default_level"})


class Policy(Section):
    """A whole policy file."""

    base: Literal["semantic", "priority", "sjf", "fcfs"] = "semantic"
    """What runs first: `semantic` (urgency, then remaining time), `priority` (urgency, then
    arrival), `sjf` (remaining time), `fcfs` (vLLM's own scheduler, untouched)."""
    observe: bool = False
    """Leave the order to vLLM's own scheduler: requests are read, logged and counted as under this
    policy, and nothing else is done."""
    levels: int = Field(5, ge=1, le=100)
    """Urgency levels; 0 is the most urgent."""
    tiers: tuple[Tier, ...] = ()
    """Name, SLOs and limits of each level: one entry per level, most urgent first. Empty:
    levels without names or SLOs."""
    default_level: int = Field(2, ge=0)
    """Level of a request without a hint or a prediction."""
    profile: str = AUTO
    """Engine profile (alpha, beta, gamma). `auto`: derived at start from the model's configuration
    and the device. Otherwise a name under configs/profiles or a path."""
    correct_profile: bool = True
    """Scale the profile's times to match measured steps; each kind (prefill, decode, load) by at
    most 100."""
    rank_uncached: bool = False
    """The remaining time by which waiting requests are ordered leaves out the prefill that the
    prefix cache saves, as far as that is known: a bounded number of requests is looked up in each
    step. For `base: semantic` and `sjf`."""
    hints: estimates.Hints = estimates.Hints()
    preemption: eviction.Preemption = eviction.Preemption()
    retention: eviction.Retention = eviction.Retention()
    protect: order.Protect = order.Protect()
    predictor: estimates.Predictor = estimates.Predictor()
    sessions: estimates.Sessions = estimates.Sessions()
    decision: estimates.MissedCosts = estimates.MissedCosts()
    weighted_levels: order.WeightedLevels = order.WeightedLevels()
    kv_peak: order.KvPeakKnobs = order.KvPeakKnobs()
    aging: order.Aging = order.Aging()
    deadlines: order.Deadlines = order.Deadlines()
    fair_share: order.FairShareKnobs = order.FairShareKnobs()
    tenants: order.Tenants = order.Tenants()
    events: overload.Events = overload.Events()
    shedding: overload.Shedding = overload.Shedding()
    admission: overload.Admission = overload.Admission()
    dedup: overload.Dedup = "none"
    """Which older requests a new one with the same `dedup_key` in `vllm_xargs` supersedes:
    `waiting` those that have not started, `running` also those that have. Keys are separate per
    tenant; without tenants a client can supersede the requests of others by guessing their keys."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Policy:
        last = self.levels - 1
        for name in _LEVEL_KEYS:
            value = operator.attrgetter(name)(self)
            if value is not None and value > last:
                raise ValueError(f"{name}: {value} is not a level; valid: 0 to {last}")
        hints = self.hints
        for tenant, level in hints.most_urgent_level_of.items():
            if level > last:
                raise ValueError(
                    f"hints.most_urgent_level_of.{tenant}: {level} is not a level; valid: 0 to "
                    f"{last}"
                )
        limited = hints.most_urgent_level or any(hints.most_urgent_level_of.values())
        for name in ("urgency", "priority"):
            if getattr(hints, name) == "cap" and not limited and last:
                raise ValueError(
                    f"hints.{name}: cap has no effect with most_urgent_level: 0; valid: "
                    f"most_urgent_level from 1 to {last}"
                )
        if self.deadlines.stated and self.base == "sjf":
            raise ValueError(
                "deadlines.stated: needs levels, which base: sjf ignores; valid: false"
            )
        if hints.most_urgent_level_of and not self._caps_hints:
            raise ValueError(
                "hints.most_urgent_level_of: without effect, as no hint is capped; valid with "
                "hints.urgency or hints.priority: cap, or a tier that has a service_tier"
            )
        factor = self.weighted_levels.factor
        if factor is not None and self.base != "semantic":
            raise ValueError(
                f"weighted_levels.factor: {factor:g} needs base: semantic; valid: unset"
            )
        if self.rank_uncached and not self.uses_length:
            raise ValueError(
                f"rank_uncached: true has no effect with base: {self.base}; valid: base: semantic "
                "or sjf"
            )
        return self

    @model_validator(mode="after")
    def _one_tier_per_level(self) -> Policy:
        if not self.tiers:
            return self
        if len(self.tiers) != self.levels:
            raise ValueError(
                f"tiers: {len(self.tiers)} entries for levels: {self.levels}; valid: one per level"
            )
        [(name, count)] = Counter(tier.name for tier in self.tiers).most_common(1)
        if count > 1:
            raise ValueError(f"tiers: the name {name!r} occurs twice; valid: distinct names")
        wanted = Counter(tier.service_tier for tier in self.tiers if tier.service_tier is not None)
        for service_tier, count in wanted.items():
            if count > 1:
                raise ValueError(
                    f"tiers: service_tier: {service_tier} occurs twice; valid: one tier for each"
                )
        if self.tiers[0].shed_order is not None:
            raise ValueError("tiers.0.shed_order: the most urgent tier is never shed; valid: unset")
        shares = sum(tier.share or 0.0 for tier in self.tiers)
        if shares > 1.0 + 1e-9:
            raise ValueError(f"tiers: the shares add up to {shares:g}; valid: at most 1")
        return self

    @cached_property
    def all_tiers(self) -> tuple[Tier, ...]:
        """The tier of each level; without SLOs or limits if the policy has no tiers."""
        return self.tiers or tuple(Tier(name=str(level)) for level in range(self.levels))

    @cached_property
    def tier_names(self) -> tuple[str, ...]:
        """Name of each level in metrics and messages: its number if the policy has no tiers."""
        return tuple(tier.name for tier in self.all_tiers)

    @cached_property
    def service_tiers(self) -> dict[str, int]:
        """The level of each `service_tier` of the OpenAI API that the policy knows."""
        levels: dict[str, int] = {}
        for level, tier in enumerate(self.tiers):
            if tier.service_tier is not None:
                levels[tier.service_tier] = level
        if "default" in levels:
            levels["auto"] = levels["default"]
        return levels

    @cached_property
    def target_shares(self) -> tuple[float, ...]:
        """Target share of each tier; tiers without one divide the rest evenly."""
        left = max(0.0, 1.0 - sum(tier.share or 0.0 for tier in self.all_tiers))
        without = sum(tier.share is None for tier in self.all_tiers)
        return tuple(
            left / without if tier.share is None else tier.share for tier in self.all_tiers
        )

    def in_stock_order(self) -> Policy:
        """The policy of vLLM's own scheduler, with the same levels and SLOs."""
        tiers = tuple(Tier(name=tier.name, slo=tier.slo) for tier in self.tiers)
        return Policy(
            base="fcfs", levels=self.levels, default_level=self.default_level, tiers=tiers
        )

    @property
    def _caps_hints(self) -> bool:
        """Whether `hints.most_urgent_level` and those of tenants apply to a hint."""
        return "cap" in (self.hints.urgency, self.hints.priority) or bool(self.service_tiers)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Keys that were given and change nothing, because vLLM's own scheduler runs."""
        if self.base != "fcfs":
            return ()
        return tuple(sorted(self.model_fields_set - _FCFS_KEYS))

    @property
    def uses_urgency(self) -> bool:
        """Whether the rank depends on the urgency level."""
        return self.base in ("semantic", "priority")

    @property
    def uses_length(self) -> bool:
        """Whether the rank depends on the predicted output length."""
        return self.base in ("semantic", "sjf")

    def weighs(self, level: float) -> bool:
        """Whether requests of an effective level are ordered by urgency and time together."""
        return self.weighted_levels.factor is not None and level > order.STRICT_LEVEL

    def reads(self, hinted: bool, length_known: bool = False) -> bool:
        """Whether the predictor reads a request's text: only if the policy uses a level that no
        hint states (`hinted`), or a length that the request does not state (`length_known`)."""
        if not self.predictor.enabled:
            return False
        wants_level = self.uses_urgency and not hinted
        wants_length = self.uses_length and not length_known
        return wants_level or wants_length


def load_policy(name_or_path: str | Path) -> Policy:
    """Read a policy by the name of a shipped one (`ems`) or by path. PolicyError if the file is
    missing, empty, not YAML, or invalid."""
    data, source = read_config(name_or_path, kind="policy")
    if data is None:  # what an editor or a template that failed may leave
        raise PolicyError(f"{source}: the file is empty; `{{}}` stands for all defaults")
    return parse_policy(data, source)


def parse_policy(data: Any, source: str = "policy") -> Policy:
    """Validate the content of a policy file. PolicyError names `source`, with one line per
    problem; for a removed key it says what takes its place."""
    kept, removed = take_removed(data)
    problems = [f"{source}: {sentence}" for sentence in removed]
    try:
        policy = parse_section(Policy, kept, source)
    except PolicyError as error:
        raise PolicyError("\n".join([*problems, str(error)])) from error
    if problems:
        raise PolicyError("\n".join(problems))
    return policy
