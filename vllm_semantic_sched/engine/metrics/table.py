"""All metrics that this package adds to the server's /metrics. Label values are bounded: tiers (or
levels), engines, and words from the code; never a request id, a tenant or a text."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vllm_semantic_sched.policy.order.inversions import InversionCause
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.policy.retention import PreemptionKind
from vllm_semantic_sched.predict.window import REASONS


class Metric(NamedTuple):
    """A metric `semsched:NAME`, where NAME is its key in the table; counters end in `_total`."""

    help: str
    # In addition to `engine`, which all metrics have: labels with the values known beforehand;
    # those of `tier` depend on the policy.
    labels: Mapping[str, Sequence[str]] = MappingProxyType({})
    buckets: tuple[float, ...] = ()  # ascending upper bounds of a histogram, without +Inf

    def series(self, tiers: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """The combinations of label values that are known beforehand. They are published as 0 at
        the start, because Prometheus sees no increase from absent to 1."""
        values_by_label = [
            tiers if label == "tier" else values for label, values in self.labels.items()
        ]
        return itertools.product(*values_by_label)


# A percentile is interpolated within a bucket, and is as wrong as that is wide.
_SECONDS = (
    0.01, 0.025, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5,
    10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 90.0,
    120.0, 180.0, 300.0, 450.0, 600.0, 900.0,
)  # fmt: skip
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
_RATIOS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0)

_TIER: Mapping[str, Sequence[str]] = {"tier": ()}
_KINDS = tuple(kind.value for kind in PreemptionKind)

COUNTERS = {
    "requests": Metric(
        "Requests by what was known of their urgency on arrival.",
        {"level_from": ("hint", "priority", "service_tier", "session", "instant", "default")},
    ),
    "ended_requests": Metric(
        "Requests by how they ended: completed, failed, cancelled, refused.",
        {**_TIER, "outcome": ("completed", "failed", "cancelled", "refused")},
    ),
    "refused_requests": Metric(
        "Requests ended without their answer, by the code that the client got.",
        {"code": [code.value for code in Code], **_TIER},
    ),
    "finish_order_violations": Metric(
        "Completed requests that were there when a less urgent one finished (paper, eq. 2); "
        "counted while events are logged.",
        _TIER,
    ),
    "seat_order_violations": Metric(
        "Requests that got their first seat after a less urgent one that arrived later, by cause "
        "(unread: the prediction of one of them was not back; shorter: the policy puts short "
        "requests first; promoted: the other one gained levels; limit: a tenant's cap or a "
        "reservation; not_ready: the engine skipped it); counted while events are logged.",
        # A misread level is known to nobody here.
        {
            **_TIER,
            "cause": [
                cause.value for cause in InversionCause if cause is not InversionCause.MISREAD
            ],
        },
    ),
    "predictions": Metric("Urgency levels read from prompts.", {"level": ()}),
    "instant_predictions": Metric("Prompts that the instant reader read on arrival."),
    "corrected_levels": Metric(
        "Requests whose provisional level the predictor raised (made more urgent) or lowered.",
        {"direction": ("raised", "lowered")},
    ),
    "operator_levels": Metric(
        "Levels that an operator has set (`semsched level`), by what became of the request: raised "
        "(made more urgent), lowered, or kept at its level.",
        {"change": ("raised", "lowered", "kept")},
    ),
    "failed_predictions": Metric(
        "Prompts that the predictor could not read; served at the default level."
    ),
    "unreadable_prompts": Metric(
        "Prompts that the predictor cannot judge, served at the default level (empty: no word; "
        "broken: binary data; script: letters of no language that it knows; encoded: base64 and "
        "the like; repetitive: the same words over and over).",
        {"reason": REASONS},
    ),
    "cached_predictions": Metric(
        "Prompts answered from the predictions remembered of earlier ones."
    ),
    "predictor_restarts": Metric("Predictor process restarts."),
    "unread_prompts": Metric("Prompts not sent to the predictor because its queue was full."),
    "invalid_hints": Metric(
        "Urgency hints that are not a level, and times to wait that are not positive numbers; "
        "ignored."
    ),
    "forged_readings": Metric(
        "Requests in which the client set `vllm_xargs.semsched_reading`, which only the server "
        "itself may set; ignored."
    ),
    "invalid_dedup_keys": Metric("Keys for deduplication that cannot be used; served without."),
    "preemptions": Metric(
        "Preemptions by what happened to the KV (recompute, swap, partial; drop: the request was "
        "ended) and why (urgent: a more urgent request took the seat; reservation: it sat on "
        "reserved capacity; tenant_cap: its tenant held too much KV; kv_shortage: the KV cache was "
        "full; reset: the cache was reset).",
        {"kind": _KINDS, "reason": ("urgent", "reservation", "tenant_cap", "kv_shortage", "reset")},
    ),
    "admission_preemptions": Metric(
        "Preemptions that made room for a more urgent waiting request."
    ),
    "hold_steps": Metric("Engine steps in which requests were held for a protected one."),
    "held_seconds": Metric("Seconds in which running requests were held.", _TIER),
    "forgone_tokens": Metric("Tokens that held requests would have got in these steps."),
    "promotions": Metric("Promotions of requests by their waiting time."),
    "overtakings": Metric("Admissions of requests that only their age put before others."),
    "deadline_boosted_requests": Metric("Requests raised because their deadline was near."),
    "capped_requests": Metric(
        "Requests served at a lower level because their tenant had its part of the top levels."
    ),
    "preempted_tokens": Metric("Tokens whose KV victims held when they were preempted."),
    "saved_tokens": Metric("Tokens of victims whose KV was copied to the host."),
    "loaded_tokens": Metric("Tokens of victims whose KV came back from the host."),
    "found_tokens": Metric("Tokens of victims whose KV was still in the device's prefix cache."),
    "recomputed_tokens": Metric("Tokens of victims whose KV had to be computed again."),
    "abandoned_tokens": Metric("Tokens of victims that ended before they got a seat again."),
    "lost_copies": Metric("Host copies given up because the prefix cache was reset."),
    "thrashing_preemptions": Metric(
        "Preemptions of requests that had got few tokens since the last one."
    ),
    "copy_seconds": Metric(
        "Seconds of saves and loads, by the engine profile and as measured.",
        {"copy": ("save", "load"), "source": ("predicted", "measured")},
    ),
    "resume_seconds": Metric(
        "Seconds from a victim's new seat, or the start of its load, to its next token, by the "
        "engine profile (alone) and as measured (in whole engine steps, with all that run).",
        {"kind": _KINDS[:-1], "source": ("predicted", "measured")},
    ),
    "policy_reloads": Metric(
        "Times that the policy file was read again: adopted, unchanged or refused.",
        {"result": ("adopted", "unchanged", "refused")},
    ),
    "policy_errors": Metric(
        "Exceptions in the scheduler's own code, by the task that failed; vLLM's order was used "
        'instead. engine="http": in the HTTP server.',
        {"doing": ()},
    ),
    "event_log_lines": Metric("Lines written to the event log."),
    "event_log_dropped_lines": Metric(
        "Transitions that the event log lacks: its queue was full, or its file not writable.",
        {"reason": ("queue_full", "not_writable")},
    ),
}

GAUGES = {
    "tier_info": Metric("1; says which level a tier is.", {**_TIER, "level": ()}),
    "pressure": Metric("How scarce resources are: 0 none, 1 warning, 2 critical."),
    "resource_use": Metric(
        "Use of each resource by what there is: kv, seats and queue as predicted, step by the "
        "shortest SLO for the time per token.",
        {"resource": ()},
    ),
    "shed_tiers": Metric("Number of tiers being shed."),
    "queued_tokens": Metric("Predicted tokens of requests that wait for a first seat.", _TIER),
    "slo_compliance": Metric(
        "Share of requests that met the SLO of their tier, over the window.", _TIER
    ),
    "slo_headroom": Metric(
        "How far the SLO's percentile is below its target, as a share of the target; negative "
        "where an SLO is missed.",
        _TIER,
    ),
    "waiting_requests": Metric("Requests without a seat.", _TIER),
    "running_requests": Metric("Requests with a seat.", _TIER),
    "longest_wait_seconds": Metric(
        "How long the request that waits longest has been without a seat.", _TIER
    ),
    "fair_share_deviation": Metric(
        "Share of the engine's time used recently less the target share, among the tiers with "
        "requests waiting.",
        _TIER,
    ),
    "reservation_free_seats": Metric(
        "Seats that less urgent tiers can still take beside the reservations of a tier and more "
        "urgent ones; negative: seats that they have borrowed.",
        _TIER,
    ),
    "waiting_tenants": Metric("Tenants with requests waiting.", _TIER),
    "session_floors": Metric("Sessions whose next request inherits an urgent level."),
    "unpredicted_requests": Metric("Waiting requests whose prediction is not back yet."),
    "predictor_queue": Metric("Prompts that wait for the predictor."),
    "predictor_up": Metric(
        "1 while a predictor runs and has loaded its model; absent where the policy wants none."
    ),
    "host_pool_usage": Metric("Share of the host pool that holds KV."),
    "host_pool_fragmentation": Metric("Share of its free part outside the longest free run."),
    "host_copies": Metric("Waiting requests that have KV on the host."),
    "preparation_queue": Metric(
        'Requests queued before parsing and tokenization in the API server (engine="http").'
    ),
    "paused": Metric('Whether an operator has paused the server (engine="http").'),
    "canary": Metric("Whether a canary is running (`semsched canary`)."),
    "observing": Metric(
        "Whether vLLM orders the requests by itself and the scheduler only observes."
    ),
    "policy_version": Metric(
        "1 for the policy that the server started with, one more for each that replaced it."
    ),
    "policy_hash": Metric(
        "A number that depends on every value of the policy in force; equal where it is the same."
    ),
    "profile_scale": Metric(
        "Time observed by that of the engine profile, for prefill, decode (a step of one "
        "sequence), batch (a step of the largest batch so far) and load.",
        {"kind": ()},
    ),
    "hold_cost": Metric(
        "Share of the last minute of engine time that holds cost; at most `protect.price`. Absent "
        "where the policy holds nobody."
    ),
    "length_ratio": Metric(
        "Observed by expected output tokens over about the last hundred answers."
    ),
}

HISTOGRAMS = {
    "queueing_delay_seconds": Metric("Arrival at the scheduler to first seat.", _TIER, _SECONDS),
    "time_to_first_token_seconds": Metric(
        "Arrival at the scheduler to first token.", _TIER, _SECONDS
    ),
    "e2e_latency_seconds": Metric(
        "Arrival at the scheduler to last token, of completed requests.", _TIER, _SECONDS
    ),
    "schedule_seconds": Metric("Time of one scheduling step.", buckets=_STEP_SECONDS),
    "preparation_seconds": Metric(
        'How long a request waits in the HTTP server until it is parsed (engine="http").',
        buckets=_SECONDS,
    ),
    "prediction_latency_seconds": Metric(
        "Arrival of a request to its prediction being applied.", buckets=_SECONDS
    ),
    "prediction_pass_seconds": Metric(
        "One forward pass of the predictor, with its pipes.", buckets=_SECONDS
    ),
    "prediction_batch_size": Metric(
        "Texts in one forward pass of the predictor.", buckets=(1, 2, 4, 8, 16, 32, 64)
    ),
    "length_error_ratio": Metric(
        "Output tokens of an answer that the model ended, by those that were predicted for it.",
        buckets=_RATIOS,
    ),
}
