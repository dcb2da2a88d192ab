"""Reads scenario files, validates them like policy files, and expands their sweeps."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.facts.files import read_config
from vllm_semantic_sched.policy.facts.section import PolicyError, parse_section
from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile
from vllm_semantic_sched.sim.sections import PredictorModel, Settings


@dataclass(frozen=True)
class Scenario:
    """One cell of the sweep (`point`: swept fields and values): all inputs of its runs. `profile`
    has the true times of the engine, `assumed_profile` those that the policies (by scheduler)
    assume."""

    point: dict[str, Any]
    settings: Settings
    profile: EngineProfile
    assumed_profile: EngineProfile
    policies: dict[str, Policy]

    def slos(self, scheduler: str) -> list[Slo]:
        """The promises to each level under a scheduler."""
        policy = self.policies[scheduler]
        return list(self.settings.slos or (policy.tier(n).slo for n in range(policy.levels)))


def load_scenarios(
    name_or_path: str | Path, changes: dict[str, Any] | None = None
) -> list[Scenario]:
    """Read a scenario file and expand its sweep; `changes` replace fields by dotted names.
    PolicyError if the file is missing, is not YAML, or is invalid in a cell."""
    data, source = read_config(name_or_path, kind="scenario")
    return parse_scenarios({} if data is None else data, source, changes)


def parse_scenarios(
    data: Any, source: str = "scenario", changes: dict[str, Any] | None = None
) -> list[Scenario]:
    """See `load_scenarios`; `source` is named in messages."""
    if isinstance(data, dict):
        data = copy.deepcopy(data)
        for path, value in (changes or {}).items():
            _set(data, path, value, source)
    settings = parse_section(Settings, data, source)
    scenarios = []
    for point in _points(settings, source):
        cell = copy.deepcopy(data)
        for path, value in point.items():
            _set(cell, path, value, source)
        scenarios.append(_cell(cell, point, source))
    return scenarios


def _points(settings: Settings, source: str) -> list[dict[str, Any]]:
    axes = []
    for axis in settings.sweep:
        counts = {len(values) for values in axis.values()}
        if len(counts) != 1 or counts == {0}:
            raise PolicyError(
                f"{source}: sweep: fields of one axis need equally many values, "
                f"got {json.dumps({path: len(values) for path, values in axis.items()})}"
            )
        axes.append(
            [dict(zip(axis, values, strict=True)) for values in zip(*axis.values(), strict=True)]
        )
    return [
        {path: value for part in parts for path, value in part.items()}
        for parts in itertools.product(*axes)
    ]


def _set(data: dict[str, Any], path: str, value: Any, source: str) -> None:
    *groups, last = path.split(".")
    for name in groups:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise PolicyError(f"{source}: {path}: {name} is not a group of keys")
    data[last] = value


def _cell(data: dict[str, Any], point: dict[str, Any], source: str) -> Scenario:
    settings = parse_section(Settings, data, source)
    policies = {
        name: _policy(name, content, settings, source)
        for name, content in settings.schedulers.items()
    }
    levels = {policy.levels for policy in policies.values()}
    if len(levels) > 1:
        raise PolicyError(f"{source}: schedulers: policies disagree on levels: {sorted(levels)}")
    confusion = _confusion(settings.predictor, source)
    predictor = settings.predictor.model_copy(update={"confusion": confusion})
    settings = settings.model_copy(update={"predictor": predictor})
    count = levels.pop()
    _check_entries("workload.mix", settings.workload.mix, count, source)
    _check_entries("slos", settings.slos, count, source)
    _check_entries("predictor.confusion", confusion, count, source)
    for row in confusion:
        _check_entries("predictor.confusion", row, count, source)
        if not any(row) or not all(math.isfinite(weight) and weight >= 0 for weight in row):
            raise PolicyError(f"{source}: predictor.confusion: {list(row)} are not weights")
    engine = settings.engine
    profile = load_profile(engine.profile)
    assumed = load_profile(engine.assumed_profile) if engine.assumed_profile else profile
    return Scenario(point, settings, profile, assumed, policies)


def _check_entries(field: str, entries: Sequence[object], count: int, source: str) -> None:
    if len(entries) not in (0, count):
        raise PolicyError(
            f"{source}: {field}: {len(entries)} entries, but the policies have {count} levels"
        )


def _confusion(model: PredictorModel, source: str) -> tuple[tuple[float, ...], ...]:
    if model.confusion_report is None:
        return model.confusion
    try:
        report = json.loads(Path(model.confusion_report).expanduser().read_text("utf-8"))
        return tuple(tuple(float(count) for count in row) for row in report["confusion"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(
            f"{source}: predictor.confusion_report: {model.confusion_report!r} holds no confusion "
            f"matrix: {error}"
        ) from error


def _policy(name: str, content: dict[str, Any], settings: Settings, source: str) -> Policy:
    keys = dict(content)
    base = keys.pop("policy", None)
    where = f"{source}: schedulers.{name}"
    data: Any = {}
    if base is not None:
        data, where = read_config(base, kind="policy")
        where = f"{source}: schedulers.{name} ({where})"
    # fcfs stands for vLLM's own scheduler, which reads no policy.
    overrides = settings.overrides if (data or {}).get("base", keys.get("base")) != "fcfs" else {}
    policy = parse_policy(_merged(_merged(data or {}, overrides), keys), where)
    return policy.in_stock_order() if policy.observe else policy


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        both = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = _merged(below or {}, value) if both else value
    return merged
