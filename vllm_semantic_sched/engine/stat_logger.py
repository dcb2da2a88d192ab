"""Publishes the scheduler's metrics on the server's own /metrics (a vLLM stat logger plugin)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram

from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS, Metric
from vllm_semantic_sched.engine.vllm_api import StatLoggerBase, VllmConfig, detach_message


class SemanticStatLogger(StatLoggerBase):
    """One instance per engine. They share the metric objects, which have a label `engine`."""

    _metrics: ClassVar[dict[str, Any]] = {}

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._engine = str(engine_index)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        message = None if scheduler_stats is None else detach_message(scheduler_stats)
        if message is None:  # another scheduler, or nothing new
            return
        self._register()
        # Skip a name that the table lacks: an exception here would end the API server.
        for name, labels, count in message["counters"]:
            if name in COUNTERS:
                self._labelled(name, labels).inc(count)
        for name, labels, counts, total in message["histograms"]:
            _add(self._labelled(name, labels), counts, total)
        for name, labels, value in message["gauges"]:
            if name in GAUGES:
                self._labelled(name, labels).set(value)

    def log_engine_initialized(self) -> None:
        pass

    def _labelled(self, name: str, labels: list[str]) -> Any:
        return self._metrics[name].labels(self._engine, *labels)

    @classmethod
    def _register(cls) -> None:
        # Register on the first message: every vLLM server in this environment loads the plugin,
        # even if it runs another scheduler.
        if cls._metrics:
            return

        def make(table: Mapping[str, Metric], kind: Any, **options: Any) -> None:
            for name, metric in table.items():
                more = {"buckets": metric.buckets} if metric.buckets else {}
                cls._metrics[name] = kind(
                    f"semsched:{name}", metric.help, ["engine", *metric.labels], **options, **more
                )

        make(COUNTERS, Counter)
        make(HISTOGRAMS, Histogram)
        # Each of several API servers receives some of the changes.
        make(GAUGES, Gauge, multiprocess_mode="mostrecent")


def _add(histogram: Any, counts: list[tuple[int, int]], total: float) -> None:
    """Add values that are already counted by bucket. prometheus_client accepts only one value at a
    time, so this adds to its private fields, which are the same in all its modes."""
    for index, count in counts:
        histogram._buckets[index].inc(count)
    histogram._sum.inc(total)
