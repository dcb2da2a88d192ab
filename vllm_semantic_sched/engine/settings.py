"""Where the engine finds its policy."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.facts.profile import EngineProfile, load_profile
from vllm_semantic_sched.policy.facts.section import Section, parse_section

POLICY_VARIABLE = "SEMSCHED_POLICY"
DEFAULT_POLICY = "ems"


class EngineSettings(Section):
    """`--additional-config '{"semantic_sched": {...}}'`. Names and paths only: vLLM hashes the
    dict into the key of its compile cache."""

    policy: str = Field(
        DEFAULT_POLICY, description="Name of a shipped policy or path of a YAML file."
    )
    profile: str | None = Field(
        None, description="Engine profile, instead of the one that the policy names."
    )


def load_settings(additional_config: Any) -> tuple[Policy, EngineProfile]:
    """The policy and profile that the server was started with. The environment variable
    SEMSCHED_POLICY goes before the command line.

    Raises:
        PolicyError: something is missing or invalid; the message names it and what is valid.
    """
    given = additional_config.get("semantic_sched") if isinstance(additional_config, dict) else None
    settings = parse_section(EngineSettings, given or {}, source="semantic_sched")
    policy = load_policy(os.environ.get(POLICY_VARIABLE) or settings.policy)
    return policy, load_profile(settings.profile or policy.profile)
