"""Event log, metrics and dashboard of a real server with two API servers."""

import itertools
import json
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from alerts import panel_queries
from metrics_page import UNENDING, wait_until
from monitoring import rule_queries, selectors
from prometheus_client.parser import text_string_to_metric_families

from vllm_semantic_sched.cli import main
from vllm_semantic_sched.operate.client import AdminClient
from vllm_semantic_sched.operate.doctor import check_server

pytestmark = pytest.mark.engine

TIERS = ("immediate", "emergent", "urgent", "semi-urgent", "non-urgent")
POLICY = """
tiers:
  - {name: immediate, slo: {ttft: 30}, share: 0.4, reserve: {seats: 1, mode: soft}}
  - {name: emergent}
  - {name: urgent}
  - {name: semi-urgent}
  - {name: non-urgent, queue: {requests: 6}}
fair_share: {enabled: true}
sessions: {memory: 600}
tenants: {fair: true}
protect: {level: 0}
events: {path: %s}
"""
LEGAL = {
    None: {"queued"},
    "queued": {"running", "completed", "failed", "cancelled", "refused"},
    "running": {"queued", "swapped", "completed", "failed", "cancelled", "refused"},
    "swapped": {"running", "queued", "completed", "failed", "cancelled", "refused"},
}
ENDS = ("completed", "failed", "cancelled", "refused")
# There when something has failed, and where KV goes to the host.
NOT_HERE = {
    "semsched:policy_errors_total",
    "semsched:host_pool_usage",
    "semsched:host_pool_fragmentation",
    "semsched:host_copies",
}


@dataclass
class Observed:
    """A server after mixed traffic; `answers` holds status, id (if any) and level sent."""

    server: object
    log: Path
    answers: list[tuple[int, str | None, int | None]] = field(default_factory=list)

    def request(self, prompt, **body) -> urllib.request.Request:
        body = {"model": "bench", "max_tokens": 8, "ignore_eos": True, "temperature": 0} | body
        return urllib.request.Request(
            self.server.url + "/v1/completions",
            json.dumps(body | {"prompt": prompt}).encode(),
            # Every request on a connection of its own: the two API servers share them out.
            {"Content-Type": "application/json", "Connection": "close"},
        )

    def ask(self, prompt="hello", **body) -> None:
        level = body.get("vllm_xargs", {}).get("urgency")
        try:
            with urllib.request.urlopen(self.request(prompt, **body), timeout=120) as reply:
                self.answers.append((reply.status, json.load(reply)["id"], level))
        except urllib.error.HTTPError as error:
            self.answers.append((error.code, None, level))

    def leave(self) -> None:
        """Send a request, and disconnect when its answer has begun."""
        body = {"max_tokens": UNENDING, "stream": True, "vllm_xargs": {"urgency": 1}}
        with urllib.request.urlopen(self.request("gone", **body), timeout=120) as reply:
            assert reply.readline()

    def count(self, status: int) -> int:
        return sum(answer[0] == status for answer in self.answers)

    def page(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Samples by name."""
        samples: dict[str, list] = {}
        for family in text_string_to_metric_families(self.server.get_text("/metrics")):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return samples

    def events(self) -> list[dict]:
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line for line in lines if "log" not in line and line.get("from") != line["state"]]


def total(page, name, **labels) -> float:
    return sum(value for own, value in page[name] if labels.items() <= own.items())


@pytest.fixture(scope="module")
def observed(serve, slim_model, tmp_path_factory) -> Observed:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "policy.yaml").write_text(POLICY % (folder / "events.jsonl"))
    settings = json.dumps({"semantic_sched": {"policy": str(folder / "policy.yaml")}})
    server = serve(
        "--scheduler-cls=vllm_semantic_sched.SemanticScheduler",
        "--middleware=vllm_semantic_sched.Middleware",
        f"--additional-config={settings}",
        "--api-server-count=2",
        seats=4,
        model=slim_model,
        longest=UNENDING,
    )
    observed = Observed(server, folder / "events.jsonl")
    send_traffic(observed)
    return observed


def send_traffic(observed: Observed) -> None:
    """Long unimportant requests, more than may wait; then others of all levels, hinted and read;
    one whose client goes away; one that ends at a stop string."""
    bodies = [{"max_tokens": 600, "vllm_xargs": {"urgency": 4}} for _ in range(16)]
    bodies += [{"max_tokens": 20 + n, "vllm_xargs": {"urgency": n % 5}} for n in range(15)]
    bodies += [{"prompt": "my dad collapsed and isn't breathing"}, {"prompt": "a poem on rain"}]
    threads = [threading.Thread(target=observed.ask, kwargs=body) for body in bodies]
    for thread in threads:
        thread.start()
    observed.leave()
    for thread in threads:
        thread.join()
    letters = ["a", "e", "i", "o"]  # a model of random words is about to say one of them
    observed.ask("stop", max_tokens=60, ignore_eos=False, stop=letters)
    observed.ask("length", max_tokens=60, ignore_eos=False)
    observed.ask("again"), observed.ask("again")

    def predicted() -> bool:
        # An answer may be shorter than it takes to read its prompt.
        observed.ask(f"question {len(observed.answers)}", max_tokens=100)
        return total(observed.page(), "semsched:prediction_latency_seconds_count") > 0

    wait_until(predicted)
    requests = len(observed.answers) + 1  # the one that went away
    wait_until(lambda: total(observed.page(), "semsched:ended_requests_total") == requests)
    # The log is written behind.
    wait_until(lambda: sum(event["state"] in ENDS for event in observed.events()) == requests)


def test_event_log_has_every_request_once_with_legal_transitions(observed) -> None:
    lives: dict[str, list[dict]] = {}
    for event in observed.events():
        lives.setdefault(event["request"], []).append(event)
    for events in lives.values():
        assert events[0]["from"] is None
        for before, event in itertools.pairwise([{"state": None}, *events]):
            assert event["from"] == before["state"]
            assert event["state"] in LEGAL[event["from"]]
        ends = [event for event in events if event["state"] not in ("queued", "running", "swapped")]
        assert ends == events[-1:]
        assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    outcomes = Counter(events[-1]["state"] for events in lives.values())
    refused, completed = observed.count(429), observed.count(200)
    assert refused and completed
    assert refused + completed == len(observed.answers)
    assert outcomes == {"completed": completed, "refused": refused, "cancelled": 1}
    for status, answer_id, level in observed.answers:
        if status == 200:
            (name,) = [name for name in lives if name.startswith(answer_id)]
            assert lives[name][-1]["state"] == "completed"
            if level is not None:
                assert lives[name][0]["level"] == level
                assert lives[name][0]["tier"] == TIERS[level]
    reasons = Counter(events[-1].get("reason") for events in lives.values())
    assert reasons["over_capacity"] == refused and reasons["abort"] == 1
    assert reasons["stop_string"] + reasons["stop"] >= 1


def test_metrics_match_the_requests_sent(observed) -> None:
    page, events = observed.page(), observed.events()
    ends = Counter((event["tier"], event["state"]) for event in events if event["state"] in ENDS)
    for (tier, outcome), count in ends.items():
        assert total(page, "semsched:ended_requests_total", tier=tier, outcome=outcome) == count
    assert total(page, "semsched:ended_requests_total") == len(observed.answers) + 1
    assert total(page, "semsched:refused_requests_total", code="over_capacity") == observed.count(
        429
    )
    assert total(page, "semsched:e2e_latency_seconds_count") == observed.count(200)
    assert total(page, "semsched:time_to_first_token_seconds_count") >= observed.count(200)
    starts = Counter(e["request"] for e in events if e["state"] == "running")
    assert total(page, "semsched:queueing_delay_seconds_count") == len(starts)
    preempted = Counter((e["plan"], e["reason"]) for e in events if "plan" in e)
    assert preempted
    for (kind, reason), count in preempted.items():
        assert total(page, "semsched:preemptions_total", kind=kind, reason=reason) == count
    assert total(page, "semsched:requests_total") == len(observed.answers) + 1
    assert total(page, "semsched:waiting_requests") == 0
    assert total(page, "semsched:running_requests") == 0
    assert total(page, "semsched:event_log_dropped_lines_total") == 0
    assert total(page, "semsched:prediction_latency_seconds_count") > 0
    assert not page.get("semsched:policy_errors_total")
    assert {labels["engine"] for labels, _ in page["semsched:tier_info"]} == {"0"}


def test_panels_and_rules_use_existing_series(observed) -> None:
    page = observed.page()
    for title, query in [*panel_queries(), *rule_queries()]:
        for name, labels in selectors(query):
            if name not in NOT_HERE:
                assert any(labels.items() <= own.items() for own, _ in page.get(name, ())), (
                    title,
                    name,
                )


def test_label_values_never_come_from_clients(observed) -> None:
    for name, samples in observed.page().items():
        if name.startswith("semsched:"):
            for labels, _ in samples:
                for label, value in labels.items():
                    assert label == "le" or re.fullmatch(r"[\w. -]{1,40}", value), (name, labels)
                    assert "cmpl" not in value


def test_metrics_page_stays_small(observed) -> None:
    """A scrape costs as much as the page has series, whatever the requests were."""
    series = [len(all_of) for name, all_of in observed.page().items() if "semsched:" in name]
    assert sum(series) < 2000


def test_top_and_doctor_read_a_real_server(observed, capsys) -> None:
    assert main(["top", "--once", "--json", "--server", observed.server.url]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["servers"]
    assert shown["error"] is None and shown["locked"] is None and shown["paused"] is False
    figures, page = shown["figures"], observed.page()
    assert [tier["tier"] for tier in figures["tiers"]] == list(TIERS)
    started = total(page, "semsched:time_to_first_token_seconds_count")
    assert sum(tier["started"] for tier in figures["tiers"]) == started > 0
    preempted = total(page, "semsched:preemptions_total")
    assert sum(figures["preemptions"].values()) == preempted
    assert figures["kv_use"] is not None and figures["policy_versions"] == [1]
    findings = list(check_server(AdminClient(observed.server.url), None))
    assert [finding.status for finding in findings] == ["ok"] * 6, findings


def test_event_log_is_plotted_and_summarized(observed, tmp_path) -> None:
    assert main(["trace", str(observed.log), "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert sum(row["completed"] for row in rows) == observed.count(200)
    assert sum(row["refused"] for row in rows) == observed.count(429)
    assert sum(row["cancelled"] for row in rows) == 1
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = [event for event in trace if event["name"] == "thread_name"]
    assert len(threads) == len(observed.answers) + 1
    assert (tmp_path / "report.html").is_file()
