"""Finds the policy that a server was started with."""

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


def load_settings(additional_config: Any) -> Policy:
    """The policy of the server, with the profile that the command line names, if it names one. The
    environment variable SEMSCHED_POLICY overrides the command line's policy.

    Raises:
        PolicyError: names the missing or invalid value and the valid ones.
    """
    given = additional_config.get("semantic_sched") if isinstance(additional_config, dict) else None
    settings = parse_section(EngineSettings, given or {}, source="semantic_sched")
    policy = load_policy(os.environ.get(POLICY_VARIABLE) or settings.policy)
    if settings.profile is None:
        return policy
    return policy.model_copy(update={"profile": settings.profile})
