"""Publishes the scheduler's metrics on the server's own /metrics (a vLLM stat logger plugin), or
through Ray."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram

from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS, Metric
from vllm_semantic_sched.engine.vllm_api import (
    StatLoggerBase,
    VllmConfig,
    detach_message,
    ray_metrics,
)

logger = logging.getLogger("vllm.semantic_sched")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Metrics that are not published harm nobody."""


class SemanticStatLogger(StatLoggerBase):
    """One instance per engine. They share the metric objects, which have a label `engine`."""

    _metrics: ClassVar[dict[str, Any]] = {}
    _through_ray: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._engine = str(engine_index)

    @guarded(_nothing, logger)
    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        message = None if scheduler_stats is None else detach_message(scheduler_stats)
        if message is not None:  # else another scheduler, or nothing new
            self._publish(message)

    def _publish(self, message: Any) -> None:
        self._register()
        for name, labels, count in message["counters"]:
            if name in COUNTERS:
                self._labeled(name, labels).inc(count)
        for name, labels, counts, total in message["histograms"]:
            if self._through_ray:
                bounds = HISTOGRAMS[name].buckets
                observe_all(self._labeled(name, labels), bounds, dict(counts), total)
            else:
                _add(self._labeled(name, labels), counts, total)
        for name, labels, value in message["gauges"]:
            if name in GAUGES:
                self._labeled(name, labels).set(value)

    def log_engine_initialized(self) -> None:
        pass

    @classmethod
    def count_in_api_server(cls, name: str, label: str) -> None:
        """See `ApiServerCounters`."""
        cls._register()
        cls._metrics[name].labels("http", label).inc()

    @classmethod
    def set_in_api_server(cls, name: str, value: float) -> None:
        """Set a gauge of the API server itself, under the label engine="http"."""
        cls._register()
        cls._metrics[name].labels("http").set(value)

    @classmethod
    def observe_in_api_server(cls, name: str, value: float) -> None:
        """Add a value to a histogram of the API server itself, under the label engine="http"."""
        cls._register()
        cls._metrics[name].labels("http").observe(value)

    @classmethod
    def publish_through_ray(cls) -> None:
        """Publish on Ray's metrics page instead; call it in a Ray worker, before an engine starts.
        Names start `ray_semsched_` there."""
        cls._through_ray = True

    def _labeled(self, name: str, labels: list[str]) -> Any:
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

        counter, gauge, histogram = (
            ray_metrics() if cls._through_ray else (Counter, Gauge, Histogram)
        )
        make(COUNTERS, counter)
        make(HISTOGRAMS, histogram)
        # Each of several API servers receives some of the changes.
        make(GAUGES, gauge, multiprocess_mode="mostrecent")


def observe_all(
    histogram: Any, bounds: Sequence[float], counts: Mapping[int, int], total: float
) -> None:
    """Add values that are counted by bucket to a histogram that accepts one value at a time: values
    of the same buckets and the same sum.

    Args:
        bounds: upper bounds of the buckets but the last.
        counts: by number of the bucket.
        total: sum of the values.
    """
    lows = (0.0, *bounds)
    sums = [0.0, 0.0]  # with all values at the lower and at the upper ends of their buckets
    for index, count in counts.items():
        sums[0] += count * lows[index]
        sums[1] += count * (bounds[index] if index < len(bounds) else lows[index])
    spread = sums[1] - sums[0]
    # Not quite at the lower ends, which belong to the buckets below.
    part = min(1.0, max(1e-3, (total - sums[0]) / spread)) if spread else 0.0
    beyond = max(0.0, total - sums[1])
    for index, count in counts.items():
        if index < len(bounds):
            value = lows[index] + part * (bounds[index] - lows[index])
        else:
            value = max(lows[index] + beyond / count, math.nextafter(lows[index], math.inf))
        for _ in range(count):
            histogram.observe(value)


class ApiServerCounters:
    """Counts what happens in the API server itself, under the label engine="http"."""

    def add(self, name: str, label: str) -> None:
        """Add 1 to a counter."""
        SemanticStatLogger.count_in_api_server(name, label)


def _add(histogram: Any, counts: list[tuple[int, int]], total: float) -> None:
    """Add values that are already counted by bucket. prometheus_client accepts only one value at a
    time, so this adds to its private fields, which are the same in all its modes."""
    for index, count in counts:
        histogram._buckets[index].inc(count)
    histogram._sum.inc(total)
