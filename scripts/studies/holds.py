"""The bound on how long a request may be held in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def excess_hold(holds: Iterable[tuple[float, float]], share: float) -> float:
    """How far the holds of one request exceed a share of the time, in the worst window.

    Args:
        holds: begin and end of each in seconds, in order.
        share: of any window that holds may take, 0 to 1.

    Returns:
        The maximum over all windows of held seconds less `share` times the window's length. Within
        the policy's bound it is at most `protect.longest_hold` and the step under way.
    """
    worst = excess = last = 0.0
    for begin, end in holds:
        # A window that pays for itself by now starts anew: the worst one begins with a hold.
        excess = max(0.0, excess - share * (begin - last)) + (1.0 - share) * (end - begin)
        worst, last = max(worst, excess), end
    return worst


def logged_holds(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Request, begin and end of each hold in an event log, whose lines tell at the release for how
    long a request was held."""
    for event in events:
        if event.get("held"):
            end = float(event["time"])
            yield str(event["request"]), end - float(event["held"]), end
