"""Publishes the scheduler's metrics on the server's own /metrics, as a vLLM stat logger plugin, or
through Ray."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge, Histogram

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS


class SemanticStatLogger(vllm_api.StatLoggerBase):
    """One instance per engine. They share the metric objects, which have a label `engine`."""

    _metrics: ClassVar[dict[str, Any]] = {}
    # By gauge, with its labels: the time of the message that set it, on the engine's clock.
    _set_at: ClassVar[dict[tuple[str, ...], float]] = {}
    through_ray = False
    """Publish on Ray's metrics page instead, where names start `ray_semsched_`. To be set in a Ray
    worker, before an engine starts."""

    def __init__(self, vllm_config: vllm_api.VllmConfig, engine_index: int = 0) -> None:
        self._engine = str(engine_index)

    @guarded(lambda *args, **kwargs: None)  # metrics that are not published harm nobody
    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Publish the engine's message (`Counters.take_message`), if its statistics carry one."""
        if scheduler_stats is None:
            return
        message = vllm_api.detach_message(scheduler_stats)
        if message is not None:  # else another scheduler, or nothing new
            self.publish(self._engine, message)

    @classmethod
    def publish(cls, engine: str, message: Mapping[str, Any]) -> None:
        """Publish a message of an engine. Messages come with statistics or as answers, so one may
        overtake another: gauges keep the newest value."""
        cls._register()
        for name, labels, count in message["counters"]:
            if name in COUNTERS:
                cls._labeled(engine, name, labels).inc(count)
        for name, labels, counts, total in message["histograms"]:
            histogram = cls._labeled(engine, name, labels)
            if cls.through_ray:
                observe_all(histogram, HISTOGRAMS[name].buckets, dict(counts), total)
                continue
            # prometheus_client accepts only one value at a time, so this adds to its private
            # fields, which are the same in all its modes.
            for index, count in counts:
                histogram._buckets[index].inc(count)
            histogram._sum.inc(total)
        for name, labels, value in message["gauges"]:
            series = (engine, name, *labels)
            if name in GAUGES and message["time"] >= cls._set_at.get(series, -math.inf):
                cls._set_at[series] = message["time"]
                cls._labeled(engine, name, labels).set(value)

    def log_engine_initialized(self) -> None:
        """No-op: metrics are registered with the first message."""

    @classmethod
    def in_api_server(cls, name: str, *labels: str) -> Any:
        """A metric of the API server itself, under the label engine="http"."""
        cls._register()
        return cls._metrics[name].labels("http", *labels)

    @classmethod
    def count_in_api_server(cls, name: str, label: str) -> None:
        """Add 1 to a counter of the API server itself."""
        cls.in_api_server(name, label).inc()

    @classmethod
    def _labeled(cls, engine: str, name: str, labels: list[str]) -> Any:
        return cls._metrics[name].labels(engine, *labels)

    @classmethod
    def _register(cls) -> None:
        # Register on the first message: every vLLM server in this environment loads the plugin,
        # even if it runs another scheduler.
        if cls._metrics:
            return
        kinds = vllm_api.ray_metrics() if cls.through_ray else (Counter, Gauge, Histogram)
        counter, gauge, histogram = kinds
        for kind, metrics in ((counter, COUNTERS), (histogram, HISTOGRAMS), (gauge, GAUGES)):
            for name, metric in metrics.items():
                options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
                if metrics is GAUGES:  # each of several API servers receives some of the changes
                    options["multiprocess_mode"] = "mostrecent"
                labels = ["engine", *metric.labels]
                cls._metrics[name] = kind(f"semsched:{name}", metric.help, labels, **options)


def observe_all(
    histogram: Any, bounds: Sequence[float], counts: Mapping[int, int], total: float
) -> None:
    """Add values to a histogram that accepts one at a time: as many for each bucket as `counts`
    says, with the sum `total`. `bounds`: upper bounds of the buckets but the last."""
    lows = (0.0, *bounds)
    highs = (*bounds, lows[-1])
    # The sums with all values at the lower and at the upper ends of their buckets.
    lowest = sum(count * lows[index] for index, count in counts.items())
    highest = sum(count * highs[index] for index, count in counts.items())
    spread = highest - lowest
    # Not quite at the lower ends, which belong to the buckets below.
    part = min(1.0, max(1e-3, (total - lowest) / spread)) if spread else 0.0
    beyond = max(0.0, total - highest)
    for index, count in counts.items():
        value = lows[index] + part * (highs[index] - lows[index])
        if index == len(bounds):
            value = max(lows[index] + beyond / count, math.nextafter(lows[index], math.inf))
        for _ in range(count):
            histogram.observe(value)
