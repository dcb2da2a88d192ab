"""Fields for gateways: documented names and directions."""

from pathlib import Path

import pytest
import yaml

from vllm_semantic_sched.fleet.gateways import (
    GATEWAYS,
    dynamo_fields,
    litellm_fields,
    llm_d_fields,
    smg_fields,
)
from vllm_semantic_sched.policy.config import load_policy, parse_policy
from vllm_semantic_sched.policy.estimates.decision import read_hints

POLICY = parse_policy({"levels": 5, "default_level": 2})
LEVELS = range(5)
OBJECTIVES = Path(__file__).parents[2] / "configs/deploy/kubernetes/llm-d-objectives.yaml"


def test_litellm_sends_the_urgency_that_vllm_reads() -> None:
    for level in LEVELS:
        sent = litellm_fields(POLICY, level, 1.0)
        assert sent.headers == {} and set(sent.body) == {"vllm_xargs"}
        hint = read_hints(
            sent.body["vllm_xargs"], 0, POLICY.hints, POLICY.levels, POLICY.default_level
        )
        assert hint.level == level and hint.problem is None


def test_llm_d_objective_priority_falls_with_level() -> None:
    priorities = []
    manifests = list(yaml.safe_load_all(OBJECTIVES.read_text()))
    for level, objective in zip(LEVELS, manifests, strict=True):
        assert objective["kind"] == "InferenceObjective"
        sent = llm_d_fields(POLICY, level, 1.0)
        assert sent.headers == {"x-llm-d-inference-objective": objective["metadata"]["name"]}
        assert sent.body == {}
        priorities.append(objective["spec"]["priority"])
    # Higher first; negative is sheddable.
    assert priorities == [2, 1, 0, -1, -2]


def test_llm_d_gets_the_slos_of_the_tier_in_milliseconds() -> None:
    tiers = [{"name": "a", "slo": {"ttft": 0.5, "tpot": 0.0501}}, {"name": "b"}]
    policy = parse_policy({"levels": 2, "default_level": 1, "tiers": tiers})
    headers = llm_d_fields(policy, 0, 1.0).headers
    assert headers["x-llm-d-slo-ttft-ms"] == "500" and headers["x-llm-d-slo-tpot-ms"] == "50"
    assert set(llm_d_fields(policy, 1, 1.0).headers) == {"x-llm-d-inference-objective"}


def test_dynamo_gets_higher_priority_and_length() -> None:
    hints = [dynamo_fields(POLICY, level, 99.6).body["nvext"]["agent_hints"] for level in LEVELS]
    assert [one["priority"] for one in hints] == [4, 3, 2, 1, 0]
    assert [one["strict_priority"] for one in hints] == [4, 3, 2, 1, 0]
    assert all(one["osl"] == 100 and set(one) == {"priority", "strict_priority", "osl"}
               for one in hints)  # fmt: skip


def test_smg_gets_a_class() -> None:
    sent = [smg_fields(POLICY, level, 1.0).headers for level in LEVELS]
    classes = ["interactive", "interactive", "default", "bulk", "bulk"]
    assert sent == [{"X-SMG-Priority": name} for name in classes]


@pytest.mark.parametrize("name", ["ems", "tiers", "fcfs"])
def test_every_shipped_level_has_fields_for_every_gateway(name) -> None:
    policy = load_policy(name)
    for level in range(policy.levels):
        for make in GATEWAYS.values():
            sent = make(policy, level, 10.0)
            assert sent.headers or sent.body
