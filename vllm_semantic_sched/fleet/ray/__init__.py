"""Runs this package on Ray Serve LLM (the extra `ray`): urgent requests first on each replica, and
each request on the replica with the least work at least as urgent. Importing it imports no Ray."""

import copy
import os
from typing import Any

from vllm_semantic_sched.engine.startup.settings import DEFAULT_POLICY
from vllm_semantic_sched.policy.config import load_policy


def build_app(args: dict[str, Any]) -> Any:
    """Build a Ray Serve application, for `import_path` in a Serve configuration, from the arguments
    of `ray.serve.llm.build_openai_app`, and `policy`: name or path (on every node), by default
    `ems`. ValueError: the policy is invalid, or an argument cannot be used with this package."""
    from ray.serve.llm import build_openai_app

    return build_openai_app(with_urgency(args))


def with_urgency(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `build_openai_app` with this package's scheduler, server, router and
    ingress. What is already set stays. Raises as `build_app` does."""
    if os.environ.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING", "0") not in ("", "0"):
        raise ValueError(
            "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING: with direct streaming the router learns "
            "neither hints nor when requests end; valid: unset"
        )
    args = copy.deepcopy(args)
    policy = str(args.pop("policy", DEFAULT_POLICY))
    ingress = "vllm_semantic_sched.fleet.ray.ingress:UrgencyIngress"
    args.setdefault("ingress_cls_config", {}).setdefault("ingress_cls", ingress)
    for config in args.get("llm_configs", ()):
        if not isinstance(config, dict):
            raise ValueError(f"llm_configs: {config!r} is not a mapping")
        config.setdefault("server_cls", "vllm_semantic_sched.fleet.ray.server:UrgencyServer")
        engine = config.setdefault("engine_kwargs", {})
        engine.setdefault("scheduler_cls", "vllm_semantic_sched.SemanticScheduler")
        settings = engine.setdefault("additional_config", {}).setdefault("semantic_sched", {})
        own_policy = settings.setdefault("policy", policy)
        load_policy(own_policy)
        router = {
            "request_router_class": "vllm_semantic_sched.fleet.ray.router.UrgencyRouter",
            "request_router_kwargs": {"policy": own_policy},
            "request_routing_stats_period_s": 0.5,  # Ray's default is 10
        }
        config.setdefault("deployment_config", {}).setdefault("request_router_config", router)
    return args
