"""Counters, histograms and gauges from the scheduler to the metrics page."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest
from alerts import panel_queries
from hypothesis import given, settings
from hypothesis import strategies as st
from monitoring import rule_queries, selectors
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from vllm.v1.metrics.stats import SchedulerStats

from vllm_semantic_sched.engine.http import commands, idle_metrics
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.engine.scheduler import SemanticScheduler
from vllm_semantic_sched.engine.vllm_api import attach_message
from vllm_semantic_sched.engine.vllm_api.capabilities import CARRIER, HOOKS
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.config.files import shipped_names

pytestmark = pytest.mark.engine

_engines = itertools.count(1000)  # the registry is the process's: an engine number per test


def message(counters, gauges=None, now=0.0, idle=True):
    return counters.take_message(lambda: gauges or {}, now, idle)


def carried(stats) -> int:
    """Size of the message that a SchedulerStats carries, as JSON."""
    if HOOKS.custom_stats:
        return len(json.dumps(stats.custom_stats)) if stats.custom_stats else 0
    return sum(map(len, getattr(stats, CARRIER)))


def publish(counters, logger, gauges=None) -> None:
    stats = SchedulerStats()
    if (new := message(counters, gauges)) is not None:
        attach_message(stats, new)
    logger.record(stats)
    assert carried(stats) == 0  # vLLM's own loggers must not see it


def published(engine: str, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"semsched:{name}", {"engine": engine, **labels})


def published_buckets(engine: str, name: str, **labels: str) -> dict[str, float]:
    """By upper bound. The registry is asked once, as it has the metrics of many tests."""
    bucket = f"semsched:{name}_bucket"
    metrics = REGISTRY.restricted_registry([bucket]).collect()
    wanted = {"engine": engine, **labels}.items()
    samples = (sample for metric in metrics for sample in metric.samples)
    return {s.labels["le"]: s.value for s in samples if wanted <= s.labels.items()}


def test_each_message_holds_only_new_values() -> None:
    counters = Counters()
    counters.add("invalid_hints")
    counters.add("requests", "hint", 2)
    first = message(counters, {"predictor_queue": 3, "waiting_requests": {"gold": 1.0}})
    assert first["counters"] == [["invalid_hints", (), 1], ["requests", ("hint",), 2]]
    assert first["gauges"] == [["predictor_queue", (), 3], ["waiting_requests", ("gold",), 1.0]]
    assert message(counters, {"predictor_queue": 3}) is None
    counters.add("requests", "hint")
    counters.raise_to("predictor_restarts", 4)
    counters.raise_to("predictor_restarts", 5)
    second = message(counters, {"predictor_queue": 2})
    assert second["counters"] == [["requests", ("hint",), 1], ["predictor_restarts", (), 5]]
    assert second["gauges"] == [["predictor_queue", (), 2]]
    assert counters.total("requests") == 3 and counters.total("predictor_restarts") == 5


def test_busy_engine_reports_at_intervals_and_idle_one_at_once() -> None:
    counters = Counters()

    def sent(now, idle):
        counters.add("invalid_hints")
        return message(counters, now=now, idle=idle) is not None

    assert sent(100.0, idle=False)
    assert not any(sent(100.0 + n / 100, idle=False) for n in range(20))
    assert sent(100.2, idle=True)
    assert sent(101.3, idle=False)
    counters.add("invalid_hints", count=5)
    assert message(counters, now=101.4, idle=True)["counters"] == [["invalid_hints", (), 5]]


@settings(max_examples=40)
@given(
    st.lists(st.floats(0, 2000), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_histogram_equals_prometheus_histogram(values, cuts) -> None:
    """For any distribution of the values over messages and API servers."""
    engine = str(next(_engines))
    counters, name = Counters(), "time_to_first_token_seconds"
    servers = [SemanticStatLogger(None, int(engine)) for _ in range(2)]
    for place, value in enumerate(values):
        counters.observe(name, value, "gold")
        if place in cuts:
            publish(counters, servers[place % 2])
    publish(counters, servers[0])
    registry = CollectorRegistry()
    reference = Histogram("r", "r", buckets=HISTOGRAMS[name].buckets, registry=registry)
    for value in values:
        reference.observe(value)
    buckets = published_buckets(engine, name, tier="gold")
    for bound in [*map(str, HISTOGRAMS[name].buckets), "+Inf"]:
        assert buckets[bound] == registry.get_sample_value("r_bucket", {"le": bound})
    assert published(engine, f"{name}_count", tier="gold") == len(values)
    assert published(engine, f"{name}_sum", tier="gold") == pytest.approx(sum(values))


def test_counters_and_gauges_are_published_per_engine() -> None:
    engines = [next(_engines), next(_engines)]
    for engine, count in zip(engines, (1, 2), strict=True):
        counters = Counters()
        counters.start_at_zero(["a"])
        counters.add("preemptions", ("recompute", "urgent"), count)
        publish(counters, SemanticStatLogger(None, engine), {"running_requests": {"a": count}})
    for engine, count in zip(map(str, engines), (1, 2), strict=True):
        labels = {"kind": "recompute", "reason": "urgent"}
        assert published(engine, "preemptions_total", **labels) == count
        assert published(engine, "running_requests", tier="a") == count
        assert published(engine, "ended_requests_total", tier="a", outcome="failed") == 0
        assert published(engine, "predictor_restarts_total") == 0
        assert published(engine, "e2e_latency_seconds_count", tier="a") == 0


def test_metric_names_are_unique_and_end_in_their_unit() -> None:
    names = [*COUNTERS, *GAUGES, *HISTOGRAMS]
    assert len(set(names)) == len(names)
    for name, metric in HISTOGRAMS.items():
        assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert name.endswith(("_seconds", "_size", "_ratio")), name
    labels = {
        label
        for table in (COUNTERS, GAUGES, HISTOGRAMS)
        for m in table.values()
        for label in m.labels
    }
    assert not labels & {"request", "request_id", "tenant", "user", "engine"}


def test_latency_buckets_are_narrow_and_end_at_the_shipped_slos() -> None:
    for name in ("time_to_first_token_seconds", "e2e_latency_seconds", "queueing_delay_seconds"):
        bounds = HISTOGRAMS[name].buckets
        assert all(high <= 2 * low for low, high in itertools.pairwise(bounds) if low >= 0.025)
        assert all(high <= 5 / 3 * low for low, high in itertools.pairwise(bounds) if low >= 0.1)
    bounds = HISTOGRAMS["time_to_first_token_seconds"].buckets
    slos = [tier.slo.ttft for name in shipped_names("policy") for tier in load_policy(name).tiers]
    assert {slo for slo in slos if slo is not None} <= set(bounds)


TIERS = """
predictor: {enabled: false}
levels: 3
default_level: 1
tiers: [{name: gold}, {name: silver}, {name: bronze}]
"""


def test_requests_are_counted_per_tier(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(TIERS)
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=1, semantic_sched={"policy": str(path)}
    )
    page = SemanticStatLogger(None, engine := next(_engines))
    make_stats = scheduler.make_stats

    def published_stats(*args, **kwargs):
        stats = make_stats(*args, **kwargs)
        page.record(stats)
        return stats

    scheduler.make_stats = published_stats
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, urgency=2, output_tokens=30))
    run_step(scheduler)
    scheduler.add_request(make_request("urgent", urgency=0, output_tokens=5))
    run_step(scheduler)
    gauges = scheduler.gauges()
    assert gauges["waiting_requests"] == {"gold": 0, "silver": 0, "bronze": 2}
    assert gauges["running_requests"] == {"gold": 1, "silver": 0, "bronze": 0}
    assert gauges["longest_wait_seconds"]["bronze"] > 0 == gauges["longest_wait_seconds"]["gold"]
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
    counters = scheduler.counters
    assert counters.total("ended_requests", ("gold", "completed")) == 1
    assert counters.total("ended_requests", ("bronze", "completed")) == 2
    assert counters.total("preemptions", ("recompute", "urgent")) == 1
    assert counters.total("recomputed_tokens") >= 20
    assert counters.total("policy_errors") == 0
    for tier, count in (("gold", 1), ("bronze", 2)):
        for name in ("queueing_delay", "time_to_first_token", "e2e_latency"):
            assert published(str(engine), f"{name}_seconds_count", tier=tier) == count
    assert published(str(engine), "schedule_seconds_count") > 5


def test_seat_order_violations_are_counted_with_the_cause(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    log = f"events: {{path: {tmp_path / 'events.jsonl'}}}\n"
    path.write_text(TIERS + "tenants: {fair: true, seats: 0.5}\n" + log)
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=2, semantic_sched={"policy": str(path)}
    )
    for name in ("running", "capped"):
        scheduler.add_request(make_request(name, urgency=0, tenant="greedy"))
    scheduler.add_request(make_request("later", urgency=2, tenant="other"))
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
    counters = scheduler.counters
    assert counters.total("seat_order_violations", ("gold", "limit")) == 1
    assert counters.total("seat_order_violations") == 1
    assert counters.total("policy_errors") == 0


def test_abort_counts_as_cancelled_and_stop_string_as_completed(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(TIERS)
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})

    class Tokenizer:
        def decode(self, ids):
            return "".join("word, "[i % 6] for i, _ in enumerate(ids))

    scheduler.predictions.tokenizer = Tokenizer()
    from vllm.v1.request import RequestStatus

    for name, stop in (("gone", None), ("stopped", ["rd"]), ("other", ["xyz"])):
        request = make_request(name, output_tokens=50)
        request.sampling_params.stop = stop
        scheduler.add_request(request)
    for _ in range(10):
        run_step(scheduler)
    scheduler.finish_requests(["gone", "stopped", "other"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.counters.total("ended_requests", ("silver", "cancelled")) == 2
    assert scheduler.counters.total("ended_requests", ("silver", "completed")) == 1


EVERYTHING = """
predictor: {enabled: false}
protect: {level: 0}
tiers:
  - {name: a, slo: {ttft: 30}, share: 0.4, reserve: {seats: 1, mode: soft}}
  - {name: b}
  - {name: c}
  - {name: d}
  - {name: e}
fair_share: {enabled: true}
tenants: {fair: true}
sessions: {memory: 600}
"""
# Of the predictor, of KV on the host, of estimates that need either, and of errors.
ELSEWHERE = ("predictor_", "host_", "profile_", "length_", "predictions", "policy_errors")


def test_idle_engine_reports_without_a_request(tmp_path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(TIERS)
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    engine = str(next(_engines))
    scheduler.vllm_config.parallel_config.data_parallel_index = int(engine)

    async def call(name, command):
        return [commands.run(scheduler, command)]

    core = SimpleNamespace(call_utility_all_async=call)
    client = SimpleNamespace(engine_core=core, call_scheduler=call)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    asyncio.run(idle_metrics.publish(app))
    assert published(engine, "policy_version") == 1
    assert published(engine, "ended_requests_total", tier="gold", outcome="completed") == 0
    path.write_text(TIERS.replace("default_level: 1", "default_level: 2"))
    commands.run(scheduler, "load_policy").result(timeout=10)
    commands.run(scheduler, "adopt_policy")
    asyncio.run(idle_metrics.publish(app))
    assert published(engine, "policy_version") == 2
    assert published(engine, "policy_reloads_total", result="adopted") == 1
    scheduler.log_stats = False  # vLLM's --disable-log-stats
    assert commands.run(scheduler, "report") == (int(engine), None)


def test_older_message_does_not_set_gauges_back() -> None:
    engine = str(next(_engines))
    counters = Counters()
    counters.add("invalid_hints")
    older = message(counters, {"predictor_queue": 3, "host_copies": 2}, now=1.0)
    counters.add("invalid_hints")
    newer = message(counters, {"predictor_queue": 4, "host_copies": 2}, now=2.0)
    SemanticStatLogger.publish(engine, newer)
    SemanticStatLogger.publish(engine, older)
    assert published(engine, "predictor_queue") == 4
    assert published(engine, "host_copies") == 2
    assert published(engine, "invalid_hints_total") == 2


def test_panels_and_rules_use_series_that_the_scheduler_reports(tmp_path) -> None:
    """All series with their labels; test_monitoring.py checks a real server."""
    path = tmp_path / "policy.yaml"
    path.write_text(EVERYTHING)
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=2, semantic_sched={"policy": str(path)}
    )
    logger = SemanticStatLogger(None, engine := next(_engines))
    make_stats, sizes = scheduler.make_stats, []

    def publish_stats(*args, **kwargs):
        stats = make_stats(*args, **kwargs)
        sizes.append(carried(stats))
        logger.record(stats)
        return stats

    scheduler.make_stats = publish_stats
    for number in range(10):
        scheduler.add_request(make_request(str(number), urgency=number % 5))
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
    # As the HTTP server does.
    SemanticStatLogger.in_api_server("paused").set(0.0)
    SemanticStatLogger.in_api_server("preparation_queue").set(0.0)
    SemanticStatLogger.in_api_server("preparation_seconds").observe(0.0)
    there: dict[str, list[dict[str, str]]] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.labels.get("engine") in (str(engine), "http"):
                there.setdefault(sample.name, []).append(sample.labels)
    for title, query in [*panel_queries(), *rule_queries()]:
        for name, labels in selectors(query):
            if not name.removeprefix("semsched:").startswith(ELSEWHERE):
                assert any(labels.items() <= own.items() for own in there.get(name, ())), (
                    title,
                    name,
                )
    assert max(sizes) < 20_000 and sorted(sizes)[len(sizes) // 2] < 2000
    assert scheduler.counters.total("policy_errors") == 0
