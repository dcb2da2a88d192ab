"""Reads scenario files, validates them like policy files, and expands their sweeps."""

import copy
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.config.files import read_config
from vllm_semantic_sched.policy.config.section import PolicyError, parse_section
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile
from vllm_semantic_sched.sim.sections import Settings


@dataclass(frozen=True)
class Scenario:
    """One cell of the sweep: all inputs of its runs."""

    point: dict[str, Any]  # swept fields and values
    settings: Settings
    profile: EngineProfile  # true times of the engine
    assumed_profile: EngineProfile  # what the policies assume
    policies: dict[str, Policy]  # by scheduler

    def slos(self, scheduler: str) -> list[Slo]:
        """The SLO of each level under a scheduler."""
        return list(self.settings.slos or (tier.slo for tier in self.policies[scheduler].all_tiers))


def load_scenarios(
    name_or_path: str | Path, changes: dict[str, Any] | None = None
) -> list[Scenario]:
    """Read a scenario file and expand its sweep; `changes` replace fields by dotted names.
    PolicyError if the file is missing, is not YAML, or is invalid in a cell."""
    data, source = read_config(name_or_path, kind="scenario")
    if data is None:  # an empty file
        data = {}
    return parse_scenarios(data, source, changes)


def parse_scenarios(
    data: Any, source: str = "scenario", changes: dict[str, Any] | None = None
) -> list[Scenario]:
    """See `load_scenarios`; `source` is named in messages."""
    if isinstance(data, dict):
        data = copy.deepcopy(data)
        for path, value in (changes or {}).items():
            _set(data, path, value, source)
    settings = parse_section(Settings, data, source)
    for axis in settings.sweep:
        for path in axis.keys() & (changes or {}).keys():
            raise PolicyError(
                f"{source}: {path}: the scenario's sweep sets this field; change `sweep` instead"
            )
    scenarios = []
    for point in _points(settings, source):
        cell = copy.deepcopy(data)
        for path, value in point.items():
            _set(cell, path, value, source)
        scenarios.append(_cell(cell, point, source))
    return scenarios


def _points(settings: Settings, source: str) -> Iterator[dict[str, Any]]:
    axes = []
    for axis in settings.sweep:
        counts = {path: len(values) for path, values in axis.items()}
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise PolicyError(
                f"{source}: sweep: fields of one axis need equally many values, "
                f"got {json.dumps(counts)}"
            )
        points = zip(*axis.values(), strict=True)
        axes.append([tuple(zip(axis, values, strict=True)) for values in points])
    for parts in itertools.product(*axes):
        yield dict(itertools.chain(*parts))


def _set(data: dict[str, Any], path: str, value: Any, source: str) -> None:
    *groups, last = path.split(".")
    for name in groups:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise PolicyError(f"{source}: {path}: {name} is not a group of keys")
    data[last] = value


def _cell(data: dict[str, Any], point: dict[str, Any], source: str) -> Scenario:
    settings = parse_section(Settings, data, source)
    policies = _policies(settings, source)
    levels = {policy.levels for policy in policies.values()}
    if len(levels) > 1:
        raise PolicyError(f"{source}: schedulers: policies disagree on levels: {sorted(levels)}")
    unknown = [name for name in settings.gate.schedulers if name not in policies]
    if unknown:
        raise PolicyError(
            f"{source}: gate.schedulers: {unknown[0]!r} is not one of {', '.join(policies)}"
        )
    for field, names, base in (
        ("edf", settings.baselines.edf, "sjf"),
        ("las", settings.baselines.las, "priority"),
        ("boost", settings.baselines.boost, "semantic"),
        ("sessions", settings.baselines.sessions, "semantic"),
    ):
        for name in names:
            where = f"{source}: baselines.{field}: {name!r}"
            if name not in policies:
                raise PolicyError(f"{where} is not one of {', '.join(policies)}")
            if policies[name].base != base:
                raise PolicyError(f"{where} needs base: {base}")
            # Whose times are not those of work, and cannot be weighed against levels.
            strict = field in ("boost", "sessions")
            if strict and policies[name].weighted_levels.factor is not None:
                raise PolicyError(f"{where} needs weighted_levels.factor: null")
    confusion = settings.predictor.confusion
    by_level: list[tuple[str, Sequence[object]]] = [
        ("workload.mix", settings.workload.mix),
        ("workload.deadlines", settings.workload.deadlines),
        ("slos", settings.slos),
        ("predictor.confusion", confusion),
    ]
    by_level += [("predictor.confusion", row) for row in confusion]
    (count,) = levels
    for field, entries in by_level:
        if len(entries) not in (0, count):
            raise PolicyError(
                f"{source}: {field}: {len(entries)} entries, but the policies have {count} levels"
            )
    for row in confusion:
        if not any(row) or not all(math.isfinite(weight) and weight >= 0 for weight in row):
            raise PolicyError(f"{source}: predictor.confusion: {list(row)} are not weights")
    engine = settings.engine
    profile = load_profile(engine.profile)
    assumed = load_profile(engine.assumed_profile) if engine.assumed_profile else profile
    return Scenario(
        point=point,
        settings=settings,
        profile=profile,
        assumed_profile=assumed,
        policies=policies,
    )


def _policies(settings: Settings, source: str) -> dict[str, Policy]:
    """The policy of each scheduler. `fcfs` knows no levels: unless it states some, its requests are
    counted by those of the others."""
    policies = {
        name: _policy(name, content, settings, source)
        for name, content in settings.schedulers.items()
    }
    others = [policy for policy in policies.values() if policy.base != "fcfs"]
    for name, policy in policies.items():
        if policy.base != "fcfs" or "levels" in policy.model_fields_set or not others:
            continue
        if policy.levels != others[0].levels:
            levels = {"levels": others[0].levels, "default_level": others[0].default_level}
            content = levels | settings.schedulers[name]
            policies[name] = _policy(name, content, settings, source)
    return policies


def _policy(name: str, content: dict[str, Any], settings: Settings, source: str) -> Policy:
    keys = dict(content)
    base = keys.pop("policy", None)
    where = f"{source}: schedulers.{name}"
    data: Any = {}
    if base is not None:
        data, file = read_config(base, kind="policy")
        where = f"{where} ({file})"
    data = data or {}
    # fcfs stands for vLLM's own scheduler, which reads no policy.
    is_stock = data.get("base", keys.get("base")) == "fcfs"
    if not is_stock:
        data = _merged(data, settings.overrides)
    policy = parse_policy(_merged(data, keys), where)
    return policy.in_stock_order() if policy.observe else policy


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = base | changes
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merged(base[key], value)
    return merged
