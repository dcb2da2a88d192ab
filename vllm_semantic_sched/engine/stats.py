"""What the scheduler counts, and how it travels from the engine to the API servers."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

# vLLM's SchedulerStats drops unknown fields on its way between the processes, but this one of
# its dictionaries keeps any string as a key.
_CARRIER = "num_kv_fetch_reqs_by_stage"
_MARK = '{"semsched":'


class Counters:
    """Running totals by name and label, and gauges."""

    def __init__(self) -> None:
        self._totals: Counter[tuple[str, str]] = Counter()
        self._sent: dict[str, Any] = {}

    def add(self, name: str, label: str = "", count: int = 1) -> None:
        """Add to a total."""
        self._totals[name, label] += count

    def raise_to(self, name: str, total: int) -> None:
        """Take over a total that is counted elsewhere."""
        if total:  # what never happened is not reported
            self._totals[name, ""] = total

    def total(self, name: str, label: str | None = None) -> int:
        """A total; over all labels if none is given."""
        if label is not None:
            return self._totals[name, label]
        return sum(count for (key, _), count in self._totals.items() if key == name)

    def attach(self, stats: Any, gauges: dict[str, float]) -> None:
        """Put totals and gauges on vLLM's SchedulerStats, if anything changed.

        Totals travel as totals, not as increments, so that a lost message loses nothing.
        """
        totals = [[name, label, count] for (name, label), count in self._totals.items()]
        message = {"totals": totals, "gauges": gauges}
        if message != self._sent:
            self._sent = message
            getattr(stats, _CARRIER)[json.dumps({"semsched": message})] = 0


def detach(stats: Any) -> dict[str, Any] | None:
    """Take a message of `Counters.attach` off again; None if there is none."""
    carrier = getattr(stats, _CARRIER, None)
    if not carrier:
        return None
    key = next((key for key in carrier if key.startswith(_MARK)), None)
    if key is None:
        return None
    del carrier[key]
    message: dict[str, Any] = json.loads(key)["semsched"]
    return message
