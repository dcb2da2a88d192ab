"""Policy changes while the server runs: which keys may change, and the version in force."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_semantic_sched.policy.config import AUTO, Policy
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import EngineProfile

# Key or group of keys: why it cannot change.
NEEDS_RESTART = {
    "base": "the queues were built for it",
    "tenants.fair": "the queues were built for it",
    "levels": "the predictor and all queued requests use that number of levels",
    "predictor": "the predictor process was started with it",
    "events": "the log was opened with it",
}


class PolicyVersion(NamedTuple):
    """The version of the policy in force."""

    number: int  # 1 at the start of the server, plus 1 for each replacement
    fingerprint: str  # see the function of that name


def fingerprint(policy: Policy, profile: EngineProfile) -> str:
    """Twelve hexadecimal digits, a hash of all values of policy and profile. A derived profile does
    not count: it may differ between engines of one policy."""
    values = [policy.model_dump(mode="json")]
    if policy.profile != AUTO:
        values.append(profile.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def changed_keys(old: Policy, new: Policy) -> list[str]:
    """Keys with different values, in the order of `semsched policy keys`."""
    return [key for key, _, _ in _differences(old.model_dump(), new.model_dump(), "")]


def check_live_change(old: Policy, new: Policy) -> None:
    """PolicyError if a policy needs a restart, with a line per key: both values and the reason."""
    problems = [
        f"{key}: {before!r} -> {after!r} needs a restart: {reason}"
        for key, before, after in _differences(old.model_dump(), new.model_dump(), "")
        if (reason := restart_reason(key)) is not None
    ]
    if problems:
        raise PolicyError("\n".join(problems))


def restart_reason(key: str) -> str | None:
    """Why a key cannot change while the server runs; None if it can."""
    reasons = (why for name, why in NEEDS_RESTART.items() if f"{key}.".startswith(f"{name}."))
    return next(reasons, None)


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old:
            yield from _differences(old[name], new[name], f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
