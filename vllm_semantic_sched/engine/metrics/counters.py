"""Collects counters, histograms and gauges in the engine, as messages for the API servers."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vllm_semantic_sched.engine.metrics.table import COUNTERS, HISTOGRAMS

# Seconds between messages of a busy engine; Prometheus scrapes every few seconds.
_INTERVAL = 1.0

Labels = tuple[str, ...]
Series = tuple[str, Labels]
"""Name and labels of a counter, histogram or gauge."""
Gauges = Mapping[str, float | Mapping[Any, float]]
"""Values by name, or by name and label (several labels: a tuple)."""


class Counters:
    """Counters, histograms and gauges by name and labels (see `engine.metrics.table`). A message
    carries what was added since the one before. vLLM passes each to the API server that gets output
    in that step, and Prometheus adds up the servers' counts."""

    def __init__(self) -> None:
        self.totals: defaultdict[Series, float] = defaultdict(float)  # of the counters
        self._sent: dict[Series, float] = {}
        # Since the last message: counts by bucket, and sums.
        self._observed: defaultdict[Series, Counter[int]] = defaultdict(Counter)
        self._sums: defaultdict[Series, float] = defaultdict(float)
        self._gauges: dict[Series, float] = {}  # as last sent
        self._next_message = 0.0

    def start_at_zero(self, tiers: Sequence[str]) -> None:
        """Report 0 for all series whose labels are known beforehand."""
        for name, metric in COUNTERS.items():
            for labels in metric.series(tiers):
                self.add(name, labels, 0)
        for name, metric in HISTOGRAMS.items():
            for labels in metric.series(tiers):
                self._observed[name, labels] = Counter()

    def add(self, name: str, label: str | Labels = (), count: float = 1) -> None:
        """Add to a counter; `label` holds the values of its labels, in the order of the table."""
        self.totals[name, _labels(label)] += count

    def raise_to(self, name: str, total: float, label: str | Labels = ()) -> None:
        """Raise a counter to a total that is counted elsewhere."""
        more = total - self.total(name, label)
        if more > 0:
            self.add(name, label, more)

    def observe(self, name: str, value: float, label: str | Labels = ()) -> None:
        """Add a value to a histogram; `label` as for `add`."""
        series = name, _labels(label)
        self._observed[series][bisect_left(HISTOGRAMS[name].buckets, value)] += 1
        self._sums[series] += value

    def total(self, name: str, label: str | Labels | None = None) -> float:
        """Value of a counter; without a label, the sum over all labels."""
        if label is not None:
            return self.totals.get((name, _labels(label)), 0.0)
        return sum(count for (key, _), count in self.totals.items() if key == name)

    def take_message(
        self, gauges: Callable[[], Gauges], now: float, idle: bool
    ) -> dict[str, Any] | None:
        """What is new at time `now` since the last message, as plain values for
        `SemanticStatLogger`; None if nothing is, or no message is due. One is due at intervals, and
        when the engine is about to be idle: the next step that could carry one may be far away.
        `gauges` is called only then."""
        if now < self._next_message and not idle:
            return None
        self._next_message = now + _INTERVAL
        # Gauges come first, because `gauges` may bring counters up to date.
        new_gauges: list[Any] = []
        for (name, labels), value in _series(gauges()):
            if self._gauges.get((name, labels)) != value:
                self._gauges[name, labels] = value
                new_gauges.append([name, labels, value])
        new_counts: list[Any] = []
        for (name, labels), total in self.totals.items():
            sent = self._sent.get((name, labels))
            if total != sent:
                new_counts.append([name, labels, total - (sent or 0.0)])
        new_values: list[Any] = []
        for (name, labels), counts in self._observed.items():
            new_values.append([name, labels, list(counts.items()), self._sums[name, labels]])
        if not (new_counts or new_values or new_gauges):
            return None
        message = {
            "time": now,
            "counters": new_counts,
            "histograms": new_values,
            "gauges": new_gauges,
        }
        self._sent = dict(self.totals)
        self._observed.clear()
        self._sums.clear()
        return message


def _series(gauges: Gauges) -> Iterator[tuple[Series, float]]:
    for name, values in gauges.items():
        if isinstance(values, Mapping):
            for label, value in values.items():
                yield (name, _labels(label)), value
        else:
            yield (name, ()), values


def _labels(label: str | Labels) -> Labels:
    return (label,) if isinstance(label, str) else label
