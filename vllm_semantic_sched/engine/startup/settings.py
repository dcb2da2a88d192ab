"""What a server was started with: its policy and the file of it, its swap connector."""

import os
from pathlib import Path
from typing import Any

from pydantic import Field

from vllm_semantic_sched.policy.config import Policy, load_policy
from vllm_semantic_sched.policy.config.files import resolve_config
from vllm_semantic_sched.policy.config.section import Section, parse_section

POLICY_VARIABLE = "SEMSCHED_POLICY"
DEFAULT_POLICY = "ems"


class EngineSettings(Section):
    """`--additional-config '{"semantic_sched": {...}}'`. It holds names and paths only, because
    vLLM hashes the dict into the key of its compile cache."""

    policy: str = DEFAULT_POLICY
    """Name of a shipped policy or path of a YAML file."""
    profile: str | None = None
    """Engine profile, instead of the one that the policy names."""
    observe: bool = False
    """Only observe, whatever the policy says (policy key `observe`)."""
    events: str | None = None
    """File of the event log, instead of the policy's `events.path`."""
    watch: bool = False
    """Reload the policy within ten seconds of a change of its file. Needs the middleware."""


SWAP_CONNECTOR = {
    "kv_connector": "SemanticSwapConnector",
    "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
    "kv_role": "kv_producer",
}
"""What vLLM's `--kv-transfer-config` needs to use the swap connector."""


class SwapConfig(Section):
    """`kv_connector_extra_config` of the swap connector."""

    host_gib: float = Field(4.0, gt=0)
    """Host memory for victims' KV, GiB per worker process."""


def parse_settings(additional_config: Any) -> EngineSettings:
    """The settings of the command line; the environment variable SEMSCHED_POLICY overrides its
    policy. Raises PolicyError, which names the invalid key and the valid ones."""
    given = None
    if isinstance(additional_config, dict):
        given = additional_config.get("semantic_sched")
    settings = parse_section(EngineSettings, given or {}, source="semantic_sched")
    policy = os.environ.get(POLICY_VARIABLE)
    if policy:
        return settings.model_copy(update={"policy": policy})
    return settings


def load_settings(additional_config: Any) -> Policy:
    """The policy of the server, with what the command line sets of it. Raises PolicyError, which
    names the missing or invalid value and the valid ones."""
    settings = parse_settings(additional_config)
    policy = load_policy(settings.policy)
    given = settings.model_dump(include={"observe", "profile"}, exclude_defaults=True)
    if settings.events is not None:
        given["events"] = policy.events.model_copy(update={"path": settings.events})
    return policy.model_copy(update=given)


class PolicyFile:
    """Polls a policy file, given by name or path, for changes; PolicyError if there is none."""

    def __init__(self, name_or_path: str | Path) -> None:
        self.path = resolve_config(name_or_path, "policy")
        self._seen: tuple[int, ...] | None = None
        self._adopted: tuple[int, ...] | None = None

    def has_changed(self) -> bool:
        """Whether the file differs from when this last returned True, and is as at the last call:
        nobody reads it while it is being written. True at the second call too: a server reads its
        policy long before it is up. A link to another file counts, as in a Kubernetes ConfigMap; a
        file that is gone does not."""
        before = self._seen
        self._seen = _signature(self.path)
        if self._seen is None or self._seen != before or self._seen == self._adopted:
            return False
        self._adopted = self._seen
        return True


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
