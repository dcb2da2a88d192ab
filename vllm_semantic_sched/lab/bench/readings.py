"""What the scheduler read from the texts, from its event log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.facts.files import read_config


def write_logging_policy(policy: str, path: Path, log: Path) -> None:
    """Write a copy of a policy to `path` whose event log is `log`, which is emptied.

    Raises:
        PolicyError: the policy does not exist or is invalid.
    """
    data, source = read_config(policy, kind="policy")
    data = data or {}
    data = {**data, "events": {**data.get("events", {}), "path": str(log.resolve())}}
    parse_policy(data, source)
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    log.unlink(missing_ok=True)


def read_levels(log: Path) -> Mapping[str, int]:
    """Return the level of each request that the predictor gave a level, by the client's request id.

    The last level counts, as a later reading may correct an earlier one.
    """
    levels: dict[str, int] = {}
    if not log.is_file():
        return levels
    for line in log.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["level_from"] == "prediction":
            levels[client_id(event["request"])] = event["level"]
    return levels


def client_id(engine_id: str) -> str:
    """vLLM's `cmpl-ID-0-12345678` without what vLLM adds: kind, prompt number and random part."""
    return engine_id.removeprefix("cmpl-").rsplit("-", 2)[0]
