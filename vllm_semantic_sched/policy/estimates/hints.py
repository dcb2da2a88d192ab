"""Reads urgency hints from clients. They are untrusted, so parsing never raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.policy.config.estimates import Hints
from vllm_semantic_sched.policy.facts.job import LevelSource


@dataclass(frozen=True, slots=True)
class Hint:
    """The result of a client's hints under the policy."""

    level: int | None  # None if no hint states one or the policy ignores it
    source: LevelSource  # the hint that states it
    problem: str | None = None  # why the urgency hint is unusable, for the log


def read_hints(extra_args: Any, priority: Any, hints: Hints, levels: int) -> Hint:
    """Read an explicit urgency from a request's `vllm_xargs`, else a nonzero priority (vLLM's: 0
    and unset look the same). Both may be of any type. `levels`: of the policy."""
    problem = None
    if hints.urgency != "ignore" and isinstance(extra_args, dict) and "urgency" in extra_args:
        level = _as_level(sent := extra_args["urgency"])
        if level is not None and 0 <= level < levels:
            return Hint(_capped(level, hints.urgency, hints), LevelSource.HINT)
        text = repr(sent)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        problem = f"urgency {text} is not a level; valid: 0 to {levels - 1}"
    if hints.priority != "ignore" and isinstance(priority, int) and priority != 0:
        # vLLM's priorities are unbounded: use the nearest level.
        level = _capped(min(max(priority, 0), levels - 1), hints.priority, hints)
        return Hint(level, LevelSource.PRIORITY, problem)
    return Hint(None, LevelSource.DEFAULT, problem)


def _as_level(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # Headers and form fields arrive as text; int() would also accept "1_0" and other scripts.
    if isinstance(value, str) and len(value) <= 3 and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _capped(level: int, mode: str, hints: Hints) -> int:
    return max(level, hints.most_urgent_level) if mode == "cap" else level
