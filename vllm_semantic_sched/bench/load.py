"""How a load is described. Imports nothing heavy, so that the command line can show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LEVELS = 5
"""Urgency levels, 0 the most urgent."""

MIXES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "even": (0.20, 0.20, 0.20, 0.20, 0.20),
        "rare": (0.05, 0.15, 0.25, 0.30, 0.25),
    }
)
"""Share of each urgency level, most urgent first."""


@dataclass(frozen=True)
class WorkloadConfig:
    """What is drawn. Times in seconds, lengths in tokens."""

    requests: int = 600
    mix: str = "even"
    gap: float = 0.5
    max_burst: int = 50
    seed: int = 0
    min_output_tokens: int = 8
    max_output_tokens: int = 384


def parse_mix(mix: str) -> tuple[float, ...]:
    """Shares of the levels: a name in `MIXES` or five weights separated by colons.

    Raises:
        ValueError: neither a known name nor five non-negative numbers with a positive sum.
    """
    if mix in MIXES:
        return MIXES[mix]
    try:
        weights = [float(part) for part in mix.split(":")]
    except ValueError:
        weights = []
    if len(weights) != LEVELS or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(
            f"mix {mix!r} is neither one of {', '.join(MIXES)} nor {LEVELS} weights like 1:2:3:2:2"
        )
    return tuple(weight / sum(weights) for weight in weights)
