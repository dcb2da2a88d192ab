"""Policy keys of earlier versions, and what takes the place of each."""

from typing import Any

_OF_THE_MODEL = (
    "it is in the model's folder, as `decision` in its config.json: `semsched train urgency` and "
    "`semsched corrections` write it"
)

# Dotted name, as `semsched policy keys` printed it: the sentence after "was removed: ". Names in
# backticks are keys of policies, of scenarios (with "scenario" before), or commands.
REMOVED = {
    "stage.mode": (
        "only simulations have the paper's gate, as scenario key `gate.schedulers`; on a server "
        "`protect.level` protects urgent decodes"
    ),
    "stage.protected_level": "only simulations have the paper's gate, as scenario key `gate.level`",
    "placement.enabled": (
        "a gateway leaves the choice of an engine to vLLM with the header X-Semsched-Placement: "
        "vllm"
    ),
    "preemption.max_victims_per_step": (
        "a step preempts at most 8 requests; to preempt less, use `preemption.min_level_gap` or "
        "`preemption.max_per_request`"
    ),
    "retention.max_stall": "a load that takes longer than one decode step runs beside the steps",
    "retention.survival": "KV is not saved while more than half of the KV blocks are free",
    "predictor.mode": (
        "a server predicts at once; in simulations it is the scenario key `predictor.mode`"
    ),
    "predictor.max_batch": (
        "a pass has at most 16 texts; more `predictor.threads` make it faster. In simulations "
        "it is the scenario key `predictor.max_batch`"
    ),
    "predictor.max_pass": "a pass takes at most 0.1 s, by the measured speed",
    "predictor.max_wait": (
        "a server predicts at once; in simulations it is the scenario key `predictor.max_wait`"
    ),
    "predictor.max_queue": "10,000 texts may wait; more `predictor.threads` read them faster",
    "predictor.cache_size": "the predictions of 4,096 prompts are kept",
    "predictor.timeout": "a process without an answer for 30 s is restarted",
    "predictor.extra_latency": (
        "in simulations, the scenario key `predictor.latency` slows the predictor"
    ),
    "predictor.instant.enabled": "`predictor.instant` says all; off is `none`",
    "predictor.instant.may": "`predictor.instant` has this value itself",
    "predictor.instant.preempt_above": (
        "a provisional level preempts from a probability of 0.9; `predictor.instant` can forbid it"
    ),
    "predictor.second_look": "the first reading of a long prompt sees its suspicious parts",
    "decision.rule": _OF_THE_MODEL,
    "decision.certain": _OF_THE_MODEL,
    "decision.possible": _OF_THE_MODEL,
    "decision.thresholds": _OF_THE_MODEL,
    "length.estimate": "lengths are compared by the mean that the model expects",
    "length.calibrate": "lengths are always adjusted to the answers of the served model",
    "length.default_tokens": "an answer without a prediction is taken for one of 256 tokens",
    "aging.step": "each `aging.interval` is worth one level",
    "aging.cap": (
        "an overdue request always outranks the rest; `aging.interval` says how late that is"
    ),
    "aging.share": (
        "at most one admission in ten goes to an aged request; a longer `aging.interval` makes "
        "these rarer"
    ),
    "deadlines.before": (
        "with `deadlines.enabled`, a request runs before the rest of its tier from its arrival "
        "until its first token is late"
    ),
    "fair_share.window": "the use of the last 20 seconds counts",
    "fair_share.max_levels": "a tier gains or loses at most two levels by its `tiers[].share`",
    "pressure.kv.warning": (
        "pressure begins at 90 % of the KV blocks; `admission.over_share` is what depends on it"
    ),
    "pressure.kv.critical": (
        "pressure is critical at 120 % of the KV blocks, predicted; `admission.over_share` is "
        "what depends on it"
    ),
    "pressure.seats.warning": (
        "pressure begins at 1.5 requests per seat; `admission.over_share` is what depends on it"
    ),
    "pressure.seats.critical": (
        "pressure is critical at 4 requests per seat; `admission.over_share` is what depends on it"
    ),
    "shedding.window": (
        "the latencies of the last five seconds decide; `tiers[].slo.percentile` says how many "
        "of them must be in time"
    ),
    "shedding.min_samples": (
        "five measured requests decide; `tiers[].slo.percentile` says how many of them must be "
        "in time"
    ),
    "shedding.recover": (
        "a tier is served again after SLOs were met for two seconds, and longer each time "
        "it soon has to be shed again"
    ),
    "dedup.enabled": "`dedup` says all: `none`, `waiting` or `running`",
    "dedup.running": (
        "`dedup` says all: `waiting` leaves requests that have started, `running` ends them"
    ),
    "events.max_bytes": (
        "the file is renamed at 100 MB; a log shipper on the folder of `events.path` keeps more"
    ),
    "events.backups": (
        "five renamed files are kept; a log shipper on the folder of `events.path` keeps more"
    ),
}


def take_removed(data: Any) -> tuple[Any, list[str]]:
    """The content of a policy file without removed keys, and a sentence for each of these."""
    sentences: list[str] = []
    return _without_removed(data, "", sentences), sentences


def _without_removed(data: Any, prefix: str, sentences: list[str]) -> Any:
    if isinstance(data, list):
        return [_without_removed(entry, f"{prefix}[]", sentences) for entry in data]
    if not isinstance(data, dict):
        return data
    kept = {}
    for name, value in data.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if key in REMOVED:
            sentences.append(f"{key} was removed: {REMOVED[key]}")
            continue
        left = _without_removed(value, key, sentences)
        # A group of which nothing is left may be gone too.
        if left or left == value:
            kept[name] = left
    return kept
