"""The schedulers that can be compared: how to start each, and what its requests tell it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_semantic_sched.bench.server import ServerConfig
from vllm_semantic_sched.bench.workload import BenchRequest

SCHEDULER_CLASS = "vllm_semantic_sched.SemanticScheduler"
MIDDLEWARE = ("--middleware", "vllm_semantic_sched.Middleware")
"""Arguments of `vllm serve` that give refused requests a status and a code."""
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

    Attributes:
        name: shown in tables; `kind@POLICY` if the policy is not the run's default.
        kind: one of `NAMES`.
        policy, profile: of the semantic schedulers; the engine profile only if it differs from
            the policy's.
        extra_args: further arguments of `vllm serve`.
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
        """Return the arguments of `vllm serve` that select this scheduler."""
        if self.kind == "fcfs":
            return ()
        if self.kind == "priority":
            return ("--scheduling-policy", "priority")
        args: tuple[str, ...] = ("--scheduler-cls", SCHEDULER_CLASS)
        given = {"policy": self.policy, "profile": self.profile}
        if config := {key: value for key, value in given.items() if value is not None}:
            args += ("--additional-config", json.dumps({"semantic_sched": config}))
        return args + self.extra_args

    def configure(self, server: ServerConfig, folder: Path, number: int = 1) -> ServerConfig:
        """Return `server` with this scheduler, and a log in `folder` for its `number`th start."""
        # A name may contain the path of a policy: keep only what can be part of a file name.
        log = f"server-{re.sub(r'[^A-Za-z0-9.]+', '-', self.name)}-{number}.log"
        return replace(server, log=folder / log, scheduler_args=self.server_args())

    def body_extras(self, request: BenchRequest) -> Mapping[str, object]:
        """Return the fields of the request's body that tell this scheduler the urgency."""
        if self.kind == "priority":
            return {"priority": request.level}
        if self.kind == "semantic-true":
            return {"vllm_xargs": {"urgency": request.level}}
        return {}


def swap_arguments(host_gib: float) -> tuple[str, ...]:
    """Return the arguments of `vllm serve` that keep KV of preempted requests in host memory."""
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
    """Parse a list like `fcfs,semantic,semantic@sjf`.

    Args:
        profile: engine profile of the semantic ones, if it is not their policy's.
        host_gib: host memory for KV of preempted requests; 0: none is kept.

    Raises:
        ValueError: a name is unknown or repeated, or a stock scheduler is given a policy.
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
