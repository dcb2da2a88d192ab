"""The tables of knobs and metrics in docs/operations.md, from the code itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS, Metric
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.keys import Key, keys_of
from vllm_semantic_sched.policy.live import restart_reason
from vllm_semantic_sched.policy.overload.refusal import Code


class Trace(NamedTuple):
    """Where an operator sees what a knob does.

    Attributes:
        codes: with which requests are refused because of it.
        metrics: without the prefix `semsched:`.
    """

    codes: tuple[Code, ...] = ()
    metrics: tuple[str, ...] = ()


TRACES = {
    "base": Trace((), ("time_to_first_token_seconds",)),
    "levels": Trace((), ("predictions_total",)),
    "tiers": Trace((), ("waiting_requests",)),
    "tiers[].name": Trace((), ("waiting_requests",)),
    "tiers[].slo.takes_seats": Trace((), ("hurried_requests_total", "preemptions_total")),
    "tiers[].slo": Trace((), ("slo_compliance", "slo_headroom")),
    "tiers[].share": Trace((Code.TIER_OVER_SHARE,), ("fair_share_deviation",)),
    "tiers[].reserve": Trace((), ("reservation_free_seats",)),
    "tiers[].queue.requests": Trace((Code.OVER_CAPACITY,), ("waiting_requests",)),
    "tiers[].queue.tokens": Trace((Code.OVER_CAPACITY,), ("queued_tokens",)),
    "tiers[].queue.timeout": Trace((Code.QUEUE_TIMEOUT,), ("longest_wait_seconds",)),
    "tiers[].shed_order": Trace((Code.SHED,), ("shed_tiers",)),
    "tiers[].preemptible": Trace((), ("preemptions_total",)),
    "tiers[].drop": Trace((Code.DROPPED,), ("refused_total",)),
    "default_level": Trace((), ("requests_total", "unpredicted_requests")),
    "profile": Trace((), ("policy_hash",)),
    "correct_profile": Trace((), ("profile_scale",)),
    "hints": Trace((), ("requests_total", "invalid_hints_total")),
    "preemption": Trace((), ("preemptions_total", "admission_preemptions_total")),
    "retention": Trace((), ("preemptions_total", "saved_tokens_total", "recomputed_tokens_total")),
    "stage": Trace((), ("time_to_first_token_seconds",)),
    "predictor": Trace((), ("predictor_up", "prediction_latency_seconds")),
    "predictor.max_batch": Trace((), ("prediction_batch_size",)),
    "predictor.max_queue": Trace((), ("predictor_queue", "unread_prompts_total")),
    "predictor.cache_size": Trace((), ("cached_predictions_total",)),
    "predictor.timeout": Trace((), ("predictor_restarts_total", "failed_predictions_total")),
    "decision": Trace((), ("predictions_total",)),
    "length": Trace((), ("length_ratio", "length_error_ratio")),
    "aging": Trace((), ("promotions_total", "overtakings_total", "longest_wait_seconds")),
    "deadlines": Trace((), ("hurried_requests_total",)),
    "fair_share": Trace((), ("fair_share_deviation",)),
    "tenants.kv": Trace((), ("preemptions_total", "waiting_tenants")),
    "tenants": Trace((), ("waiting_tenants",)),
    "tenants.top": Trace((), ("capped_requests_total",)),
    "events": Trace((), ("event_log_lines_total", "event_log_dropped_total")),
    "slo": Trace((), ("slo_compliance", "slo_headroom")),
    "pressure": Trace((), ("pressure", "resource_use")),
    "shedding": Trace((Code.SHED,), ("shed_tiers", "refused_total")),
    "admission": Trace((Code.OVER_CAPACITY,), ("refused_total",)),
    "admission.queue.tokens": Trace((Code.OVER_CAPACITY,), ("queued_tokens",)),
    "admission.queue.timeout": Trace((Code.QUEUE_TIMEOUT,), ("longest_wait_seconds",)),
    "admission.tenant": Trace((Code.TENANT_OVER_SHARE,), ("refused_total",)),
    "admission.over_share": Trace((Code.TIER_OVER_SHARE,), ("refused_total",)),
    "dedup": Trace((Code.SUPERSEDED,), ("refused_total", "invalid_dedup_keys_total")),
}
"""By key or group of keys; the longest that fits counts."""

_HEAD = ("| key | default | live | what it does | code | seen in |", "|---|---|---|---|---|---|")


def trace_of(key: str) -> Trace:
    """Where the effect of a key shows. KeyError if nobody has said."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        for name in (".".join(parts[:end]), ".".join(parts[:end]).removesuffix("[]")):
            if name in TRACES:
                return TRACES[name]
    raise KeyError(key)


def insert(path: Path) -> None:
    """Bring the tables of a page up to date: what stands between `<!-- keys -->` or
    `<!-- metrics -->` and the `<!-- end -->` after it."""
    text = path.read_text("utf-8")
    for name, table in (("keys", keys_table()), ("metrics", metrics_table())):
        begin = f"<!-- {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + table + "<!-- end -->" + rest.split("<!-- end -->", 1)[1]
    path.write_text(text, "utf-8")


def metrics_table() -> str:
    """What this package adds to the server's /metrics."""
    lines = ["| metric | labels | meaning |", "|---|---|---|"]
    for table, ending in ((COUNTERS, "_total"), (GAUGES, ""), (HISTOGRAMS, "")):
        for name, metric in sorted(table.items()):
            lines.append(" | ".join(_metric_cells(f"{name}{ending}", metric)))
    return "\n".join(lines) + "\n"


def _metric_cells(name: str, metric: Metric) -> Iterator[str]:
    kind = " (histogram)" if metric.buckets else ""
    yield f"| `semsched:{name}`{kind}"
    yield ", ".join(f"`{label}`" for label in metric.labels)
    yield metric.help + " |"


def keys_table() -> str:
    """A table for the keys at the top of a policy file, and one per section."""
    groups: dict[str, list[str]] = {"": []}
    for key in keys_of(Policy):
        group = re.split(r"[.\[]", key.name)[0] if re.search(r"[.\[]", key.name) else ""
        groups.setdefault(group, []).append(" | ".join(_cells(key)))
    lines: list[str] = []
    for group, rows in groups.items():
        lines += ["", f"### `{group}`" if group else "### At the top", "", *_HEAD, *rows]
    return "\n".join(lines).strip() + "\n"


def _cells(key: Key) -> Iterator[str]:
    trace = trace_of(key.name)
    valid = f" One of {key.valid}." if key.valid else ""
    yield f"| `{key.name}`"
    yield f"{key.default}"
    yield "yes" if restart_reason(key.name) is None else "restart"
    yield " ".join(f"{key.meaning}{valid}".split()).replace("|", "\\|")
    yield ", ".join(f"`{code.value}`" for code in trace.codes)
    yield ", ".join(f"`{name}`" for name in trace.metrics) + " |"
