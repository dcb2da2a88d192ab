"""What became of the requests of each tier, and how long they took."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from vllm_semantic_sched.trace.reader import ENDS, Life

_TIMES = ("queueing_delay", "ttft", "e2e")


class TierSummary:
    """Counts and times of one tier: eight bytes per request and time."""

    def __init__(self, level: int, tier: str) -> None:
        self.level = level
        self.tier = tier
        self.outcomes: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.times = {name: array("d") for name in _TIMES}

    def add(self, life: Life) -> None:
        """Take in a request."""
        self.outcomes[life.outcome if life.end is not None else "unfinished"] += 1
        self.preemptions.update(life.preemptions)
        if not life.whole:
            return
        if life.first_seat is not None:
            self.times["queueing_delay"].append(life.first_seat - life.arrival)
        if life.first_token is not None:
            self.times["ttft"].append(life.first_token - life.arrival)
        if life.end is not None and life.outcome == "completed":
            self.times["e2e"].append(life.end - life.arrival)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times in seconds, None where there are none."""
        import numpy as np

        figures: dict[str, Any] = {"level": self.level, "tier": self.tier}
        figures["requests"] = sum(self.outcomes.values())
        figures |= {outcome: self.outcomes[outcome] for outcome in (*ENDS, "unfinished")}
        figures["preemptions"] = dict(self.preemptions)
        for name, values in self.times.items():
            for rank in (50, 99):
                found = float(np.percentile(values, rank)) if values else None
                figures[f"{name}_p{rank}"] = found
        return figures


class Summary:
    """All tiers of a log."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[int, str], TierSummary] = {}

    def add(self, life: Life) -> None:
        """Take in a request."""
        key = (life.level, life.tier)
        if key not in self._tiers:
            self._tiers[key] = TierSummary(*key)
        self._tiers[key].add(life)

    def rows(self) -> list[dict[str, Any]]:
        """`TierSummary.to_dict` of each tier, most urgent first."""
        return [self._tiers[key].to_dict() for key in sorted(self._tiers)]
