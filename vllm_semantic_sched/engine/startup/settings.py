"""What a server was started with: its policy, its swap connector."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.facts.section import Section, parse_section

POLICY_VARIABLE = "SEMSCHED_POLICY"
DEFAULT_POLICY = "ems"


class EngineSettings(Section):
    """`--additional-config '{"semantic_sched": {...}}'`. It holds names and paths only, because
    vLLM hashes the dict into the key of its compile cache."""

    policy: str = Field(
        DEFAULT_POLICY, description="Name of a shipped policy or path of a YAML file."
    )
    profile: str | None = Field(
        None, description="Engine profile, instead of the one that the policy names."
    )
    observe: bool = Field(
        False, description="Only observe, whatever the policy says (policy key `observe`)."
    )
    events: str | None = Field(
        None, description="File of the event log, instead of the policy's `events.path`."
    )
    watch: bool = Field(
        False,
        description="Reload the policy within ten seconds of a change of its file. Needs the "
        "middleware.",
    )


SWAP_CONNECTOR = {
    "kv_connector": "SemanticSwapConnector",
    "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
    "kv_role": "kv_both",
}
"""What vLLM's `--kv-transfer-config` needs to use the swap connector."""


class SwapConfig(Section):
    """`kv_connector_extra_config` of the swap connector."""

    host_gib: float = Field(
        4.0, gt=0, description="Host memory for victims' KV, GiB per worker process."
    )


def parse_settings(additional_config: Any) -> EngineSettings:
    """The settings of the command line; the environment variable SEMSCHED_POLICY overrides its
    policy.

    Raises:
        PolicyError: names the invalid key and the valid ones.
    """
    given = additional_config.get("semantic_sched") if isinstance(additional_config, dict) else None
    settings = parse_section(EngineSettings, given or {}, source="semantic_sched")
    policy = os.environ.get(POLICY_VARIABLE)
    return settings.model_copy(update={"policy": policy}) if policy else settings


def load_settings(additional_config: Any) -> Policy:
    """The policy of the server, with what the command line sets of it.

    Raises:
        PolicyError: names the missing or invalid value and the valid ones.
    """
    settings = parse_settings(additional_config)
    policy = load_policy(settings.policy)
    given: dict[str, Any] = {"observe": settings.observe or None, "profile": settings.profile}
    if settings.events is not None:
        given["events"] = policy.events.model_copy(update={"path": settings.events})
    return policy.model_copy(
        update={key: value for key, value in given.items() if value is not None}
    )
