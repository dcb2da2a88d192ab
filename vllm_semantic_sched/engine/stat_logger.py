"""Publishes the scheduler's counts on the server's own /metrics (a vLLM stat logger plugin)."""

from __future__ import annotations

from typing import Any, ClassVar

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_semantic_sched.engine.stats import detach

# name of the total: (metric, labels parted by commas, help)
_TOTALS = {
    "requests": (
        "semsched:requests",
        "level_from",
        "Requests by what was known of their urgency on arrival.",
    ),
    "predictions": ("semsched:predictions", "level", "Urgency levels read from prompts."),
    "failed_predictions": (
        "semsched:failed_predictions",
        None,
        "Prompts that the predictor could not read; served at the default level.",
    ),
    "cached_predictions": (
        "semsched:cached_predictions",
        None,
        "Prompts answered from the predictions remembered of earlier ones.",
    ),
    "predictor_restarts": (
        "semsched:predictor_restarts",
        None,
        "Times that the predictor process was started in place of one that died or got stuck.",
    ),
    "unread_prompts": (
        "semsched:unread_prompts",
        None,
        "Prompts not sent to the predictor because its queue was full.",
    ),
    "invalid_hints": (
        "semsched:invalid_hints",
        None,
        "Urgency hints that are not a level; served at the predicted level.",
    ),
    "preemptions": ("semsched:preemptions", "kind", "Preemptions by what happened to the KV."),
    "admission_preemptions": (
        "semsched:admission_preemptions",
        None,
        "Preemptions that made room for a more urgent waiting request.",
    ),
    "policy_reloads": (
        "semsched:policy_reloads",
        "result",
        "Times that the policy file was read again: adopted, unchanged or refused.",
    ),
    "refused": (
        "semsched:refused",
        "code,tier",
        "Requests ended without their answer, by the code that the client got.",
    ),
    "policy_errors": (
        "semsched:policy_errors",
        "doing",
        "Exceptions in the scheduler's own code; stock order was used instead.",
    ),
}
_GAUGES = {
    "unpredicted_requests": (
        "semsched:unpredicted_requests",
        "Waiting requests whose prediction is not back yet.",
    ),
    "predictor_queue": ("semsched:predictor_queue", "Prompts that wait for the predictor."),
    "predictor_up": ("semsched:predictor_up", "1 while a predictor process runs."),
    "policy_version": (
        "semsched:policy_version",
        "1 for the policy that the server started with, one more for each that replaced it.",
    ),
    "policy_hash": (
        "semsched:policy_hash",
        "A number that depends on every value of the policy in force; equal where it is the same.",
    ),
    "length_ratio": (
        "semsched:length_ratio",
        "Observed by expected output tokens over about the last hundred answers.",
    ),
}


class SemanticStatLogger(StatLoggerBase):
    """One per engine; the metric objects are shared, told apart by the label `engine`."""

    _counters: ClassVar[dict[str, Counter]] = {}
    _gauges: ClassVar[dict[str, Gauge]] = {}

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._engine = str(engine_index)
        self._seen: dict[tuple[str, str], int] = {}

    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        message = None if scheduler_stats is None else detach(scheduler_stats)
        if message is None:  # another scheduler, or nothing new
            return
        self._register()
        for name, label, total in message["totals"]:
            if name in _TOTALS:
                increment = total - self._seen.get((name, label), 0)
                self._seen[name, label] = total
                self._labelled(name, label).inc(max(0, increment))
        for name, value in message["gauges"].items():
            if name in _GAUGES:
                self._gauges[name].labels(engine=self._engine).set(value)

    def log_engine_initialized(self) -> None:
        pass

    def _labelled(self, name: str, label: str) -> Any:
        keys = _keys(_TOTALS[name][1])
        values = label.split(",", len(keys) - 1) if keys else []
        return self._counters[name].labels(self._engine, *values)

    @classmethod
    def _register(cls) -> None:
        # Only once there is something to publish: the plugin is loaded by every vLLM server in
        # this environment, also by those that run another scheduler.
        if cls._counters:
            return
        for name, (metric, label, text) in _TOTALS.items():
            cls._counters[name] = Counter(metric, text, ["engine", *_keys(label)])
        for name, (metric, text) in _GAUGES.items():
            cls._gauges[name] = Gauge(metric, text, ["engine"], multiprocess_mode="mostrecent")


def _keys(labels: str | None) -> list[str]:
    return labels.split(",") if labels else []
