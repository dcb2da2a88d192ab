"""The schedulers that can be compared: how each is started and what each is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_semantic_sched.bench.workload import BenchRequest

SCHEDULER_CLASS = "vllm_semantic_sched.SemanticScheduler"
NAMES = ("fcfs", "priority", "semantic", "semantic-true")

_TITLES = {
    "fcfs": "vLLM FCFS",
    "priority": "vLLM priority",
    "semantic": "Semantic (text)",
    "semantic-true": "Semantic (hint)",
}


@dataclass(frozen=True)
class SchedulerSpec:
    """One row of the comparison.

    `name` is one of `NAMES`, for the semantic ones with `@POLICY` behind it where the policy
    is not the run's default. `profile` is the engine profile, where it is not the policy's;
    `extra_args` are further arguments of `vllm serve`.
    """

    name: str
    kind: str
    policy: str | None = None
    extra_args: tuple[str, ...] = ()
    profile: str | None = None

    @property
    def title(self) -> str:
        """The row's heading."""
        suffix = self.name.partition("@")[2]
        return f"{_TITLES[self.kind]} @{suffix}" if suffix else _TITLES[self.kind]

    def server_args(self) -> tuple[str, ...]:
        """Arguments of `vllm serve` that choose this scheduler."""
        if self.kind == "fcfs":
            return ()
        if self.kind == "priority":
            return ("--scheduling-policy", "priority")
        args: tuple[str, ...] = ("--scheduler-cls", SCHEDULER_CLASS)
        given = {"policy": self.policy, "profile": self.profile}
        if config := {key: value for key, value in given.items() if value is not None}:
            args += ("--additional-config", json.dumps({"semantic_sched": config}))
        return args + self.extra_args

    def body_extras(self, request: BenchRequest) -> Mapping[str, object]:
        """What the request's body tells this scheduler about the urgency."""
        if self.kind == "priority":
            return {"priority": request.level}
        if self.kind == "semantic-true":
            return {"vllm_xargs": {"urgency": request.level}}
        return {}


def swap_arguments(host_gib: float) -> tuple[str, ...]:
    """Arguments of `vllm serve` that keep KV of preempted requests in so much host memory."""
    connector = {
        "kv_connector": "SemanticSwapConnector",
        "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_gib": host_gib},
    }
    return ("--kv-transfer-config", json.dumps(connector))


def parse_schedulers(
    names: str, default_policy: str | None, profile: str | None = None, host_gib: float = 0.0
) -> list[SchedulerSpec]:
    """Read a list like `fcfs,semantic,semantic@sjf`.

    Args:
        profile: engine profile of the semantic ones, if it is not their policy's.
        host_gib: host memory in which they keep KV of preempted requests; 0: they do not.

    Raises:
        ValueError: an unknown or repeated name, or a policy for a stock scheduler.
    """
    specs: list[SchedulerSpec] = []
    extra = swap_arguments(host_gib) if host_gib else ()
    for name in (part.strip() for part in names.split(",")):
        kind, _, policy = name.partition("@")
        if kind not in NAMES:
            raise ValueError(f"unknown scheduler {name!r}: choose from {', '.join(NAMES)}")
        if policy and not kind.startswith("semantic"):
            raise ValueError(f"{kind} is vLLM's own and takes no policy, got {name!r}")
        if any(name == spec.name for spec in specs):
            raise ValueError(f"scheduler {name!r} is listed twice")
        specs.append(SchedulerSpec(name, kind, policy or default_policy, extra, profile))
    return specs
