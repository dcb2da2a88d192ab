"""The shipped Grafana dashboard and Prometheus alert rules: form, queries, names of metrics."""

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from alerts import DASHBOARD, FOLDER, RULES, panel_queries
from monitoring import rule_queries, selectors

from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.sim.metrics import ALL
from vllm_semantic_sched.sim.runner import Task, run_task
from vllm_semantic_sched.sim.scenario import load_scenarios

QUERIES = [*panel_queries(), *rule_queries()]


def known_series() -> dict[str, set[str]]:
    """Labels of each series, without `engine`, by its name on the metrics page."""
    series = {f"semsched:{name}_total": set(metric.labels) for name, metric in COUNTERS.items()}
    series |= {f"semsched:{name}": set(metric.labels) for name, metric in GAUGES.items()}
    for name, metric in HISTOGRAMS.items():
        series[f"semsched:{name}_bucket"] = {*metric.labels, "le"}
        series[f"semsched:{name}_sum"] = series[f"semsched:{name}_count"] = set(metric.labels)
    return series


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
def test_queries_parse_and_use_existing_metrics(title, query) -> None:
    known = known_series()
    found = selectors(query)
    assert found
    for name, labels in found:
        assert name in known, name
        assert set(labels) <= known[name] | {"engine"}
    grouped = re.findall(r"(?:by|on) \(([^)]*)\)", query)
    every = set().union(*(known[name] for name, _ in found))
    for labels in grouped:
        assert {label.strip() for label in labels.split(",")} <= every | {
            "engine",
            "instance",
            "job",
        }


def test_parser_rejects_invalid_query() -> None:
    with pytest.raises(ValueError):
        selectors("sum by (tier (semsched:waiting_requests)")


def test_panels_read_increases_and_legends_use_kept_labels() -> None:
    for title, query in QUERIES:
        for name in re.findall(r"semsched:\w+_total", query):
            increase = re.search(rf"(rate|increase)\({name}", query)
            assert increase or "policy_errors" in name, title
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            left = {label.strip() for label in grouped[1].split(",")} if grouped else set()
            assert shown <= left, panel["title"]


def test_dashboard_has_the_fields_that_grafana_needs() -> None:
    assert {"title", "uid", "panels", "templating", "schemaVersion", "time"} <= set(DASHBOARD)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in ("row", "stat", "timeseries")
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance", "engine"}


# Metrics that no panel shows, and why.
NOT_SHOWN = {
    "admission_preemptions": "the preemptions with the reason `urgent`, which a panel shows",
    "policy_hash": "a number without meaning; the alert SemschedPoliciesDiffer compares it",
}


def test_dashboard_shows_every_metric() -> None:
    shown = {name for _, query in panel_queries() for name, _ in selectors(query)}
    ending = re.compile(r"_(total|bucket|sum|count)$")
    shown = {ending.sub("", name.removeprefix("semsched:")) for name in shown}
    assert {*COUNTERS, *GAUGES, *HISTOGRAMS} - shown == set(NOT_SHOWN)


def test_every_panel_can_be_limited_to_a_server_and_an_engine() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            metrics = re.findall(r"semsched:\w+(?:{([^}]*)})?", target["expr"])
            assert metrics
            for labels in metrics:
                assert 'instance=~"$instance", engine=~"$engine"' in labels, panel["title"]


def test_alert_rules_have_the_fields_that_prometheus_needs() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Semsched[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        text = " ".join(rule["annotations"].values())
        assert re.findall(
            r"{{ *\$(?:labels\.\w+|value)(?: \| humanize\w*)? *}}", text
        ) == re.findall(r"{{[^}]*}}", text)


@pytest.mark.parametrize(
    ("alert", "threshold"),
    [
        ("SemschedManyPreemptions", "queueing_delay_seconds_count"),
        ("SemschedTopTierSloMissed", "< 0.995"),
        ("SemschedStarvation", "longest_wait_seconds"),
        ("SemschedPredictorDown", "predictor_up == 0"),
        ("SemschedOwnErrors", "policy_errors_total"),
    ],
)
def test_documented_alerts_exist(alert, threshold) -> None:
    (expression,) = [rule["expr"] for rule in RULES if rule["alert"] == alert]
    assert threshold in expression


def test_preemptions_of_the_shipped_policies_raise_no_alert() -> None:
    """Under a load of bursts beyond what the engine can serve. The alert compares preemptions with
    started requests."""
    scenario = load_scenarios("presets", {"workload.requests": 300, "repeats": 1})[0]
    for_other_loads = {"shares", "reserved", "device", "sessions"}
    assert {*scenario.policies, *for_other_loads} == set(shipped_names("policy"))
    most = {}
    for name in scenario.policies:
        row = run_task(Task(scenario, name, 0)).levels[ALL]
        most[name] = (row["recomputes"] + row["swaps"]) / (row["count"] - row["refused"])
    assert max(most.values()) < 1, most
    assert most["tiers"] > 0.05


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_each_alert_fires_when_it_should_and_only_then(tmp_path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "data" / "alert_cases.yaml").read_text("utf-8"))
    cases["rule_files"] = [str(FOLDER / "alerts.yaml")]
    fired = cases["tests"][1]["promql_expr_test"][0]["exp_samples"]
    assert len(fired) == len(RULES)
    file = tmp_path / "cases.yaml"
    file.write_text(yaml.safe_dump(cases))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
