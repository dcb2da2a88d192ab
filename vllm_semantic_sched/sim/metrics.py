"""What a run amounts to, per urgency level. The same words and formulas as the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_semantic_sched.sim.request import Run

ALL = "all"
"""The row that holds every level."""

METRICS = {
    "count": "requests",
    "normalized_waiting": "mean of (finish - arrival) / output tokens, s per token",
    "waiting_per_token": "sum of (finish - arrival) / sum of output tokens, s per token",
    "e2e_mean": "mean of finish - arrival, s",
    "e2e_p50": "median of finish - arrival, s",
    "e2e_p99": "99th percentile of finish - arrival, s",
    "ttft_mean": "mean of first token - arrival, s",
    "ttft_p99": "99th percentile of first token - arrival, s",
    "queueing_mean": "mean of first seat - arrival, s",
    "recomputes": "preemptions whose KV was dropped",
    "swaps": "preemptions whose KV was kept on the host",
    "tokens_per_second": "output tokens / time from first arrival to last finish of the row",
    "ttft_target_met": "share of requests whose first token came within the level's target",
}
"""Columns of the results and what they hold."""


def measure(
    runs: Sequence[Run], levels: int, ttft_targets: Sequence[float] = ()
) -> dict[str, dict[str, float]]:
    """Metrics by level (`"0"`, ...) and for all; levels without requests are left out.

    Args:
        runs: finished ones.
        ttft_targets: seconds per level; without them the share that met them is left out.
    """
    rows = {}
    for level in [*range(levels), None]:
        chosen = [run for run in runs if level is None or run.request.level == level]
        if chosen:
            rows[ALL if level is None else str(level)] = _row(chosen, ttft_targets)
    return rows


def _row(runs: Sequence[Run], ttft_targets: Sequence[float]) -> dict[str, float]:
    arrival = np.array([run.request.arrival for run in runs])
    tokens = np.array([run.request.output_tokens for run in runs])
    finish = np.array([run.finish for run in runs], dtype=float)
    e2e = finish - arrival
    ttft = np.array([run.first_token for run in runs], dtype=float) - arrival
    started = np.array([run.started for run in runs], dtype=float)
    row = {
        "count": float(len(runs)),
        "normalized_waiting": float(np.mean(e2e / tokens)),
        "waiting_per_token": float(e2e.sum() / tokens.sum()),
        "e2e_mean": float(e2e.mean()),
        "e2e_p50": float(np.percentile(e2e, 50)),
        "e2e_p99": float(np.percentile(e2e, 99)),
        "ttft_mean": float(ttft.mean()),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "queueing_mean": float((started - arrival).mean()),
        "recomputes": float(sum(run.recomputes for run in runs)),
        "swaps": float(sum(run.swaps for run in runs)),
        "tokens_per_second": float(tokens.sum() / (finish.max() - arrival.min())),
    }
    if ttft_targets:
        targets = np.array([ttft_targets[run.request.level] for run in runs])
        row["ttft_target_met"] = float(np.mean(ttft <= targets))
    return row


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over repeats; NaN cannot occur in a row."""
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
