"""The fields by which gateways in front of vLLM order requests: of a request's urgency level and
expected output tokens, under a policy."""

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.config import Policy


class GatewayFields(NamedTuple):
    """What to add to a request, replacing the fields of the same name."""

    headers: dict[str, str]
    body: dict[str, Any]


def litellm_fields(policy: Policy, level: int, tokens: float) -> GatewayFields:
    """LiteLLM proxy: it passes `vllm_xargs` on to vLLM. Its own `priority` does not reach vLLM."""
    return GatewayFields({}, {"vllm_xargs": {"urgency": level}})


def llm_d_fields(policy: Policy, level: int, tokens: float) -> GatewayFields:
    """llm-d router (Gateway API Inference Extension): the name of an InferenceObjective, as in
    configs/deploy/kubernetes/llm-d-objectives.yaml, and the tier's SLO in milliseconds."""
    slo = policy.all_tiers[level].slo
    headers = {"x-llm-d-inference-objective": f"urgency-{level}"}
    for name, seconds in (("ttft", slo.ttft), ("tpot", slo.tpot)):
        if seconds is not None:
            headers[f"x-llm-d-slo-{name}-ms"] = str(round(seconds * 1000))
    return GatewayFields(headers, {})


def dynamo_fields(policy: Policy, level: int, tokens: float) -> GatewayFields:
    """NVIDIA Dynamo: higher priorities first, and the expected output length. `strict_priority`
    orders before Dynamo's queue policy does, `priority` also reaches the engines."""
    priority = policy.levels - 1 - level
    hints = {"priority": priority, "strict_priority": priority, "osl": max(1, round(tokens))}
    return GatewayFields({}, {"nvext": {"agent_hints": hints}})


def smg_fields(policy: Policy, level: int, tokens: float) -> GatewayFields:
    """SMG: the class `default` for the default level, `interactive` for more urgent ones, `bulk`
    for less urgent ones. `system` is left to the operator."""
    if level < policy.default_level:
        name = "interactive"
    else:
        name = "default" if level == policy.default_level else "bulk"
    return GatewayFields({"X-SMG-Priority": name}, {})


GATEWAYS: dict[str, Callable[[Policy, int, float], GatewayFields]] = {
    "litellm": litellm_fields,
    "llm-d": llm_d_fields,
    "dynamo": dynamo_fields,
    "smg": smg_fields,
}
