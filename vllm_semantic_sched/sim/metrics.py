"""What a run amounts to, per urgency level. The same words and formulas as the benchmark."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from vllm_semantic_sched.policy.facts.tiers import Slo
from vllm_semantic_sched.sim.quantiles import Quantiles
from vllm_semantic_sched.sim.request import Run

ALL = "all"
"""The row that holds every level."""

METRICS = {
    "count": "requests, finished and refused",
    "refused": "requests that the policy refused; they count in nothing but these and `slo_met`",
    "requests_per_second": "arrivals / time from first to last arrival of the row",
    "normalized_waiting": "mean of (finish - arrival) / output tokens, s per token",
    "waiting_per_token": "sum of (finish - arrival) / sum of output tokens, s per token",
    "e2e_mean": "mean of finish - arrival, s",
    "e2e_p50": "median of finish - arrival, s",
    "e2e_p99": "99th percentile of finish - arrival, s",
    "ttft_mean": "mean of first token - arrival, s",
    "ttft_p99": "99th percentile of first token - arrival, s",
    "tpot_mean": "mean of (finish - first token) / (output tokens - 1), s",
    "queueing_mean": "mean of first seat - arrival, s",
    "recomputes": "preemptions whose KV was dropped",
    "swaps": "preemptions whose KV was kept on the host",
    "preemptions_per_minute": "preemptions per minute from first arrival to last finish",
    "tokens_per_second": "output tokens / time from first arrival to last finish of the row",
    "slo_met": "share of the requests of promised levels for which every promise was kept",
}
"""Columns of the results and what they hold. A level without a promise has no `slo_met`."""

_BLOCK = 32_768  # finished requests between two reckonings
_PERCENTILES = {"e2e": {"e2e_p50": 50, "e2e_p99": 99}, "ttft": {"ttft_p99": 99}}
_COLUMNS = (
    "level",
    "arrival",
    "tokens",
    "started",
    "first_token",
    "finish",
    "recomputes",
    "swaps",
)


class Recorder:
    """Takes in finished requests and keeps what the metrics need of them, in bounded memory.

    Args:
        slos: what each level is promised.
    """

    def __init__(self, slos: Sequence[Slo]) -> None:
        self._slos = slos
        self._columns = {name: array("d") for name in _COLUMNS}
        self._rows = [_Row() for _ in range(len(slos) + 1)]

    def add(self, run: Run) -> None:
        """Take in a finished or refused request."""
        request, columns = run.request, self._columns
        if run.refused:
            for row in (self._rows[request.level], self._rows[-1]):
                row.refuse(request.arrival, is_promised(self._slos[request.level]))
            return
        assert run.started is not None and run.first_token is not None and run.finish is not None
        columns["level"].append(request.level)
        columns["arrival"].append(request.arrival)
        columns["tokens"].append(request.output_tokens)
        columns["started"].append(run.started)
        columns["first_token"].append(run.first_token)
        columns["finish"].append(run.finish)
        columns["recomputes"].append(run.recomputes)
        columns["swaps"].append(run.swaps)
        if len(columns["level"]) == _BLOCK:
            self._reckon()

    def levels(self) -> dict[str, dict[str, float]]:
        """Metrics by level (`"0"`, ...) and for all; levels without requests are left out."""
        self._reckon()
        names = [*map(str, range(len(self._slos))), ALL]
        return {
            name: row.metrics() for name, row in zip(names, self._rows, strict=True) if row.count
        }

    def _reckon(self) -> None:
        block = {name: np.array(column) for name, column in self._columns.items()}
        for column in self._columns.values():
            del column[:]
        if not len(block["level"]):
            return
        block["e2e"] = block["finish"] - block["arrival"]
        block["ttft"] = block["first_token"] - block["arrival"]
        # An answer of one token has no time between tokens.
        block["tpot"] = (block["finish"] - block["first_token"]) / np.maximum(
            1, block["tokens"] - 1
        )
        promised, kept = np.zeros((2, len(block["level"])), dtype=bool)
        for level, slo in enumerate(self._slos):
            here = block["level"] == level
            promised |= here & is_promised(slo)
            kept |= here & is_promised(slo) & _kept(slo, block)
        block["promised"], block["kept"] = promised, kept
        for level, row in enumerate(self._rows[:-1]):
            here = block["level"] == level
            if here.any():
                row.add({name: values[here] for name, values in block.items()})
        self._rows[-1].add(block)


def is_promised(slo: Slo) -> bool:
    """Whether there is any target in it."""
    return not slo.ttft is slo.tpot is slo.e2e is None


def _kept(slo: Slo, block: dict[str, np.ndarray]) -> np.ndarray:
    kept = np.ones(len(block["level"]), dtype=bool)
    for name in ("ttft", "tpot", "e2e"):
        target = getattr(slo, name)
        if target is not None:
            kept &= block[name] <= target
    return kept


class _Row:
    """One level, or all."""

    def __init__(self) -> None:
        self.count = 0
        self._refused = self._broken = 0
        self._sums: dict[str, float] = {}
        self._first = float("inf")
        self._last_arrival = self._last = 0.0
        self._quantiles = {name: Quantiles() for name in _PERCENTILES}

    def refuse(self, arrival: float, promised: bool) -> None:
        """One was refused; if anything was promised to it, that is broken."""
        self.count += 1
        self._refused += 1
        self._broken += promised
        self._first = min(self._first, arrival)
        self._last_arrival = max(self._last_arrival, arrival)

    def add(self, block: dict[str, np.ndarray]) -> None:
        self.count += len(block["e2e"])
        sums = {
            name: block[name].sum()
            for name in ("e2e", "ttft", "tpot", "tokens", "recomputes", "swaps", "promised", "kept")
        }
        sums["normalized"] = (block["e2e"] / block["tokens"]).sum()
        sums["queueing"] = (block["started"] - block["arrival"]).sum()
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        self._first = min(self._first, float(block["arrival"].min()))
        self._last_arrival = max(self._last_arrival, float(block["arrival"].max()))
        self._last = max(self._last, float(block["finish"].max()))
        for name, quantiles in self._quantiles.items():
            quantiles.add(block[name])

    def metrics(self) -> dict[str, float]:
        sums, finished = self._sums, self.count - self._refused
        row = {
            "count": float(self.count),
            "refused": float(self._refused),
            # Not defined for one request, or for one burst.
            "requests_per_second": (self.count - 1) / max(self._last_arrival - self._first, 1e-9),
        }
        promised = sums.get("promised", 0.0) + self._broken
        if promised:
            row["slo_met"] = sums.get("kept", 0.0) / promised
        if finished:
            row |= self._of_finished(finished)
        return {name: row[name] for name in METRICS if name in row}

    def _of_finished(self, count: int) -> dict[str, float]:
        sums, span = self._sums, self._last - self._first
        row = {
            "normalized_waiting": sums["normalized"] / count,
            "waiting_per_token": sums["e2e"] / sums["tokens"],
            "e2e_mean": sums["e2e"] / count,
            "ttft_mean": sums["ttft"] / count,
            "tpot_mean": sums["tpot"] / count,
            "queueing_mean": sums["queueing"] / count,
            "recomputes": sums["recomputes"],
            "swaps": sums["swaps"],
            "preemptions_per_minute": (sums["recomputes"] + sums["swaps"]) / span * 60,
            "tokens_per_second": sums["tokens"] / span,
        }
        for name, columns in _PERCENTILES.items():
            values = self._quantiles[name].percentiles(list(columns.values()))
            row |= dict(zip(columns, values, strict=True))
        return row


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the repeats that have it."""
    names = [name for name in METRICS if any(name in row for row in rows)]
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}
