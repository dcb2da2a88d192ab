"""Metrics published through Ray, on stand-ins that collect them."""

from bisect import bisect_left
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.metrics.stats import SchedulerStats

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger, observe_all
from vllm_semantic_sched.engine.metrics.table import HISTOGRAMS
from vllm_semantic_sched.engine.vllm_api import attach_message

pytestmark = pytest.mark.engine


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=60))
def test_histogram_has_the_same_buckets_and_sum(values) -> None:
    bounds = HISTOGRAMS["time_to_first_token_seconds"].buckets
    counts = Counter(bisect_left(bounds, value) for value in values)
    seen: list[float] = []
    observe_all(SimpleNamespace(observe=seen.append), bounds, counts, sum(values))
    assert Counter(bisect_left(bounds, value) for value in seen) == counts
    # Values at the lower end of their buckets are taken for slightly larger ones.
    assert sum(seen) == pytest.approx(sum(values), rel=2e-3, abs=1e-4 * len(values))


class Collected:
    """A metric by name with its labeled values."""

    all: ClassVar[dict[str, defaultdict]] = {}

    def __init__(self, name, help, labels, buckets=None, multiprocess_mode=None):
        self.values = self.all[name] = defaultdict(list)

    def labels(self, *labels):
        values = self.values[labels]
        return SimpleNamespace(inc=values.append, set=values.append, observe=values.append)


def test_all_kinds_are_published(monkeypatch) -> None:
    monkeypatch.setattr(SemanticStatLogger, "_metrics", {})
    monkeypatch.setattr(SemanticStatLogger, "through_ray", True)
    monkeypatch.setattr(vllm_api, "ray_metrics", lambda: [Collected] * 3)
    counters = Counters()
    counters.add("policy_reloads", "adopted", 2)
    counters.observe("time_to_first_token_seconds", 0.3, "gold")
    stats = SchedulerStats()
    gauges = {"running_requests": {"gold": 4}}
    attach_message(stats, counters.take_message(lambda: gauges, now=0.0, idle=True))
    SemanticStatLogger(None, 1).record(stats)
    assert Collected.all["semsched:policy_reloads"] == {("1", "adopted"): [2]}
    assert Collected.all["semsched:running_requests"] == {("1", "gold"): [4]}
    observed = Collected.all["semsched:time_to_first_token_seconds"]
    assert observed == {("1", "gold"): [pytest.approx(0.3)]}
