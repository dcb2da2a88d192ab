"""What runs first: the rank of a job under each base policy."""

from __future__ import annotations

from typing import Literal, NamedTuple

BasePolicy = Literal["semantic", "priority", "sjf", "fcfs"]

# Level of a request that has waited as long as aging lets it; above all others.
OVERDUE = -1.0
# Level of a request of the most urgent level whose deadline is near; others gain up to level 0.
HURRIED = -0.5


class Rank(NamedTuple):
    """Lower runs first. The sequence number makes the order total (paper, section 3.3:
    (f_e, f_t); without a third term equal jobs would be compared as objects)."""

    level: float
    remaining: float  # seconds
    sequence: int


def rank_of(base: BasePolicy, level: float, remaining: float, sequence: int) -> Rank:
    """The rank of a job. Terms that the base policy does not look at are zero, so that the
    comparison falls through to the next one. Overdue jobs go by arrival under every policy.

    Args:
        level: effective urgency level, 0 = most urgent, `OVERDUE` before that.
        remaining: predicted seconds of engine work left; inf where nothing is known.
        sequence: arrival number.
    """
    if level <= OVERDUE:
        return Rank(OVERDUE, 0.0, sequence)
    return Rank(
        level if base in ("semantic", "priority") else 0,
        remaining if base in ("semantic", "sjf") else 0.0,
        sequence,
    )
