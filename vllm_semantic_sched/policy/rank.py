"""What runs first: the rank of a job under each base policy."""

from __future__ import annotations

from typing import Literal, NamedTuple

BasePolicy = Literal["semantic", "priority", "sjf", "fcfs"]


class Rank(NamedTuple):
    """Lower runs first. The sequence number makes the order total (paper, section 3.3:
    (f_e, f_t); without a third term equal jobs would be compared as objects)."""

    level: int
    remaining: float  # seconds
    sequence: int


def rank_of(base: BasePolicy, level: int, remaining: float, sequence: int) -> Rank:
    """The rank of a job. Terms that the base policy does not look at are zero, so that the
    comparison falls through to the next one.

    Args:
        level: urgency level, 0 = most urgent.
        remaining: predicted seconds of engine work left; inf where nothing is known.
        sequence: arrival number.
    """
    return Rank(
        level if base in ("semantic", "priority") else 0,
        remaining if base in ("semantic", "sjf") else 0.0,
        sequence,
    )
