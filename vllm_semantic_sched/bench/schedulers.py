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
    is not the run's default. `extra_args` are further arguments of `vllm serve`.
    """

    name: str
    kind: str
    policy: str | None = None
    extra_args: tuple[str, ...] = ()

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
        if self.policy is not None:
            config = {"semantic_sched": {"policy": self.policy}}
            args += ("--additional-config", json.dumps(config))
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


def parse_schedulers(names: str, default_policy: str | None) -> list[SchedulerSpec]:
    """Read a list like `fcfs,semantic,semantic@sjf`.

    Raises:
        ValueError: an unknown or repeated name, or a policy for a stock scheduler.
    """
    specs: list[SchedulerSpec] = []
    for name in (part.strip() for part in names.split(",")):
        kind, _, policy = name.partition("@")
        if kind not in NAMES:
            raise ValueError(f"unknown scheduler {name!r}: choose from {', '.join(NAMES)}")
        if policy and not kind.startswith("semantic"):
            raise ValueError(f"{kind} is vLLM's own and takes no policy, got {name!r}")
        if any(name == spec.name for spec in specs):
            raise ValueError(f"scheduler {name!r} is listed twice")
        specs.append(SchedulerSpec(name, kind, policy or default_policy))
    return specs
